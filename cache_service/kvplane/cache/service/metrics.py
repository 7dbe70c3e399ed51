"""Prometheus metrics: counters at the edge, gauges read from the pools when they are scraped."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane.cache.core import Preemption
from kvplane.cache.core.sequences import Status

if TYPE_CHECKING:
    from kvplane.cache.service.pools import HostedPool

_STEP_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25)


class StepSeconds(Collector):
    """A histogram of the parts of a step, kept as plain numbers: an observation is on the path of every step."""

    PARTS = ("decode", "core", "encode")

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {part: [0] * (len(_STEP_BUCKETS) + 1) for part in self.PARTS}
        self._sums: dict[str, float] = dict.fromkeys(self.PARTS, 0.0)

    def observe(self, part: str, seconds: float) -> None:
        """Count one part of one step."""
        self._counts[part][bisect_left(_STEP_BUCKETS, seconds)] += 1
        self._sums[part] += seconds

    def collect(self) -> Iterator[Metric]:
        """One histogram, a label per part."""
        family = HistogramMetricFamily("kvplane_step_seconds", "Time of a step in the service", labels=["part"])
        bounds = [*(str(bound) for bound in _STEP_BUCKETS), "+Inf"]
        for part, counts in self._counts.items():
            family.add_metric([part], list(zip(bounds, accumulate(counts), strict=True)), self._sums[part])
        yield family


class Metrics:
    """All metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.step_seconds = StepSeconds()
        self.registry.register(self.step_seconds)
        self._pools = PoolCollector()
        self.registry.register(self._pools)
        self.rejected_steps = Counter(
            "kvplane_rejected_steps", "Steps that were refused", ["reason"], registry=self.registry
        )
        self.sealed_blocks = Counter("kvplane_sealed_blocks", "Blocks sealed on all shards", registry=self.registry)
        self.lease_expiries = Counter("kvplane_lease_expiries", "Sessions whose lease ran out", registry=self.registry)
        self._preemptions = Counter(
            "kvplane_preemptions", "Sequences that had to yield", ["reason"], registry=self.registry
        )
        self._preempted_tokens = Counter(
            "kvplane_preempted_tokens", "Tokens to compute again after preemptions", registry=self.registry
        )

    def preempted(self, preemption: Preemption) -> None:
        """Count a decision."""
        self._preemptions.labels(preemption.reason.name).inc()
        self._preempted_tokens.inc(preemption.tokens_to_recompute)

    def refresh(self, pools: Iterable["HostedPool"], now: float) -> None:
        """Take a snapshot of the pools, on the thread that changes them; scrapes read the last one."""
        self._pools.refresh(pools, now)


class PoolCollector(Collector):
    """Gauges of the pools: blocks by state and their sum, sequences with ages, sessions, fragmentation."""

    def __init__(self) -> None:
        self._snapshot: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """The last snapshot."""
        yield from self._snapshot

    def refresh(self, pools: Iterable["HostedPool"], now: float) -> None:
        """Make a snapshot: all families, one sample per pool."""
        blocks = GaugeMetricFamily("kvplane_blocks", "Blocks by state", labels=["pool", "state"])
        total = GaugeMetricFamily("kvplane_pool_blocks", "Blocks without the null block", labels=["pool"])
        drift = GaugeMetricFamily(
            "kvplane_blocks_unaccounted",
            "Pool size less the sum over all states; 0 unless there is a bug",
            labels=["pool"],
        )
        reserved = GaugeMetricFamily("kvplane_reserved_blocks", "Blocks promised to prompts", labels=["pool"])
        deferred = GaugeMetricFamily(
            "kvplane_deferred_references", "References that wait for device work", labels=["pool"]
        )
        lag = GaugeMetricFamily(
            "kvplane_deferred_steps", "Steps that the oldest deferred reference waits for", labels=["pool"]
        )
        sequences = GaugeMetricFamily("kvplane_sequences", "Sequences by state", labels=["pool", "state"])
        waiting = GaugeMetricFamily(
            "kvplane_oldest_refused_admissions", "Admissions that passed the longest refused sequence", labels=["pool"]
        )
        oldest_seconds = GaugeMetricFamily(
            "kvplane_oldest_seconds",
            "Age of the oldest waiting or stalled sequence, or deferred reference",
            labels=["pool", "what"],
        )
        slots = GaugeMetricFamily(
            "kvplane_unused_slots_ratio", "Share of reserved slots without a token", labels=["pool"]
        )
        sessions = GaugeMetricFamily("kvplane_sessions", "Open sessions", labels=["pool"])
        shards = GaugeMetricFamily("kvplane_shards_connected", "Shards with a live control stream", labels=["pool"])
        counters = {
            name: CounterMetricFamily(f"kvplane_{name}", text, labels=["pool"])
            for name, text in (
                ("query_tokens", "Tokens looked up at admission"),
                ("hit_tokens", "Tokens hit at admission"),
                ("evicted_blocks", "Published blocks evicted"),
            )
        }
        for pool in pools:
            sessions.add_metric([pool.pool_id], len(pool.sessions))
            shards.add_metric([pool.pool_id], sum(link.connected for link in pool.links.values()))
            if pool.core is None:
                continue
            core, stats = pool.core, pool.core.statistics()
            by_state = {name: getattr(stats, name) for name in ("free", "cached", "held", "quarantined")}
            for state, count in by_state.items():
                blocks.add_metric([pool.pool_id, state], count)
            size = core.config.num_blocks - 1
            total.add_metric([pool.pool_id], size)
            drift.add_metric([pool.pool_id], size - sum(by_state.values()))
            reserved.add_metric([pool.pool_id], stats.reserved)
            for name, family in counters.items():
                family.add_metric([pool.pool_id], getattr(stats, name))
            waits = [each.core for each in pool.sessions.values()]
            deferred.add_metric([pool.pool_id], sum(each.deferred.coming for each in waits))
            lag.add_metric(
                [pool.pool_id],
                max(
                    (each.ledger.newest_step - each.deferred.completed_step for each in waits if each.deferred.coming),
                    default=0,
                ),
            )
            rows = core.state.rows
            for status in (Status.WAITING, Status.RUNNING, Status.PREEMPTED):
                count = int(np.count_nonzero(rows.status == status))
                sequences.add_metric([pool.pool_id, status.name.lower()], count)
            stalled = sum(len(each.stalled) for each in pool.sessions.values())
            sequences.add_metric([pool.pool_id, "stalled"], stalled)
            for what, age in pool.ages.look(core, pool.sessions.values(), now).items():
                oldest_seconds.add_metric([pool.pool_id, what], age)
            oldest = next(iter(core.state.refused.values()), None)
            passed = core.state.admissions - (oldest.refused_at or 0) if oldest is not None else 0
            waiting.add_metric([pool.pool_id], passed)
            running = rows.status == Status.RUNNING
            cover, known = int(rows.cover[running].sum()), int(rows.known[running].sum())
            slots.add_metric([pool.pool_id], max(0, cover - known) / cover if cover else 0.0)
        self._snapshot = [
            blocks,
            total,
            drift,
            reserved,
            deferred,
            lag,
            sequences,
            waiting,
            oldest_seconds,
            slots,
            sessions,
            shards,
            *counters.values(),
        ]
