"""Prometheus metrics of a compute service, in a registry of their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
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


@dataclass(slots=True)
class Totals:
    """Plain counts of the device thread, read at every scrape: a counter's lock would be taken in every run."""

    runs: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    attended_tokens: int = 0


class _Collector(Collector):
    def __init__(self, totals: Totals, read: Callable[[], Gauges]) -> None:
        self._totals = totals
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, text in (
            ("runs", "Layers executed"),
            ("written_bytes", "Bytes of keys and values written"),
            ("read_bytes", "Bytes of keys and values attended to or read"),
            ("attended_tokens", "Query tokens attended"),
        ):
            yield CounterMetricFamily(f"kvplane_compute_{name}", text, value=float(getattr(self._totals, name)))
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

        self.totals = Totals()
        self.refusals = counter("refusals", "Requests refused", ("reason",))
        self.commands = counter("commands", "Commands of the control plane carried out", ("command",))

    def watch(self, read: Callable[[], Gauges]) -> None:
        """Read totals and gauges at every scrape."""
        self.registry.register(_Collector(self.totals, read))
