"""Prometheus metrics: counters at the edge, gauges read from the pools when they are scraped."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane.cache.core import Preemption
from kvplane.cache.core.sequences import Status

if TYPE_CHECKING:
    from kvplane.cache.service.pools import HostedPool

_STEP_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25)


class StepTimer:
    """Splits a step into parts."""

    def __init__(self, histograms: dict[str, Histogram]) -> None:
        self._histograms = histograms
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        """A part is over."""
        now = perf_counter()
        self._histograms[part].observe(now - self._last)
        self._last = now


class Metrics:
    """All metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        step_seconds = Histogram(
            "kvplane_step_seconds",
            "Time of a step in the service",
            ["part"],
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._parts = {part: step_seconds.labels(part) for part in ("decode", "core", "encode")}
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

    @contextmanager
    def step_timer(self) -> Iterator[StepTimer]:
        """Times one step."""
        yield StepTimer(self._parts)

    def preempted(self, preemption: Preemption) -> None:
        """Count a decision."""
        self._preemptions.labels(preemption.reason.name).inc()
        self._preempted_tokens.inc(preemption.tokens_to_recompute)

    def watch(self, pools: Callable[[], Iterable["HostedPool"]], clock: Callable[[], float]) -> None:
        """Read gauges from the pools at every scrape."""
        self.registry.register(PoolCollector(pools, clock))


class PoolCollector(Collector):
    """Gauges of the pools: blocks by state and their sum, sequences with ages, sessions, fragmentation."""

    def __init__(self, pools: Callable[[], Iterable["HostedPool"]], clock: Callable[[], float]) -> None:
        self._pools = pools
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """All families, one sample per pool."""
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
        for pool in self._pools():
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
                [pool.pool_id], max((each.last_step - each.deferred.completed_step for each in waits), default=0)
            )
            rows = core.state.rows
            for status in (Status.WAITING, Status.RUNNING, Status.PREEMPTED):
                count = int(np.count_nonzero(rows.status == status))
                sequences.add_metric([pool.pool_id, status.name.lower()], count)
            oldest = next(iter(core.state.refused.values()), None)
            passed = core.state.admissions - (oldest.refused_at or 0) if oldest is not None else 0
            waiting.add_metric([pool.pool_id], passed)
            running = rows.status == Status.RUNNING
            cover, known = int(rows.cover[running].sum()), int(rows.known[running].sum())
            slots.add_metric([pool.pool_id], max(0, cover - known) / cover if cover else 0.0)
        yield from (blocks, total, drift, reserved, deferred, lag, sequences, waiting, slots, sessions, shards)
        yield from counters.values()
