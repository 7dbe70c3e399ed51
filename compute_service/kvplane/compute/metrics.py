"""Prometheus metrics of a compute service, in a registry of their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read at every scrape."""

    pool_bytes: int
    arena_bytes: int
    queue_depth: int
    sessions: int
    attached_processes: int
    open_plans: int
    control_plane_connected: bool


class _GaugeCollector(Collector):
    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        gauges = self._read()
        for name, text in (
            ("pool_bytes", "Bytes of block tensors"),
            ("arena_bytes", "Bytes of tensor arenas in use"),
            ("queue_depth", "Jobs queued or running on the device thread"),
            ("sessions", "Sessions served"),
            ("attached_processes", "Processes that have mapped the pool"),
            ("open_plans", "Plans between open and close"),
            ("control_plane_connected", "Whether the control stream is alive"),
        ):
            yield GaugeMetricFamily(f"kvplane_compute_{name}", text, value=float(getattr(gauges, name)))


class Metrics:
    """Counters; attended tokens per second are the rate of `kvplane_compute_attended_tokens_total`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvplane_compute_{name}", text, labels, registry=self.registry)

        self.written_bytes = counter("written_bytes", "Bytes of keys and values written")
        self.read_bytes = counter("read_bytes", "Bytes of keys and values attended to or read")
        self.attended_tokens = counter("attended_tokens", "Query tokens attended")
        self.runs = counter("runs", "Layers executed")
        self.refusals = counter("refusals", "Requests refused", ("reason",))
        self.commands = counter("commands", "Commands of the control plane carried out", ("command",))

    def watch(self, read: Callable[[], Gauges]) -> None:
        """Read gauges at every scrape."""
        self.registry.register(_GaugeCollector(read))
