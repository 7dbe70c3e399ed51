"""What is checked while a chaos run goes on: the pool's counters, what engines say, ends of processes."""

import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from _chaos_prompts import BLOCK_TOKENS, SUB_SALTS, prefixes
from _chaos_world import ENGINES, NUM_SHARDS, TTL_SECONDS

from kvplane.client import Session
from kvplane.client.control import GrpcCacheControl, connect
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import KvplaneError, UnavailableError

SAMPLE_SECONDS = 0.1
LEAK_SECONDS = TTL_SECONDS + 1.0
"""Within which blocks of the dead are back (I8), counted from when the services are well."""

ROGUE_BLOCKS = 24
"""Blocks that a misbehaving client may hold at most."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool at a moment."""

    at: float
    ready: bool
    in_use: int
    """Held and quarantined blocks."""
    epoch: int
    evicted: int


@dataclass
class Heard:
    """What an engine has said."""

    reports: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=64))
    """(when, session, most blocks held since the one before)."""
    totals: Counter[str] = field(default_factory=Counter)
    """Counts of its lives that are over."""
    counts: dict[str, int] = field(default_factory=dict)
    progressed_at: float = 0.0
    """When it last computed a token."""
    moved_at: float | None = None
    """When the sequence that waits longest last went on."""
    oldest: str = ""
    drained_at: float = 0.0
    frozen_at: float = 0.0


class Watch:
    """Samples from a thread; everything else is called by the run's main loop, or by readers of engines' output."""

    def __init__(self, address: str) -> None:
        self.lock = threading.Lock()
        self.engines = {name: Heard() for name in ENGINES}
        self.samples: deque[Sample] = deque(maxlen=4096)
        self.wrong: list[str] = []
        self.attacks: Counter[str] = Counter()
        self.rogue_busy = False
        self.turns: Counter[str] = Counter()
        """Errors that engines had to live with, by kind."""
        self._ready_seconds: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)], maxlen=8192)
        self._address = address
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    # What is heard

    def hear(self, name: str, message: dict[str, Any]) -> None:
        """A line of an engine or the rogue."""
        kind = message["kind"]
        with self.lock:
            if name == "rogue":
                self._hear_rogue(message)
                return
            heard = self.engines[name]
            if kind == "mismatch":
                self.wrong.append(f"{name}: {message}")
            elif kind == "started":
                heard.totals.update(heard.counts)
                heard.counts, heard.moved_at = {}, None
            elif kind in ("drained", "frozen"):
                setattr(heard, f"{kind}_at", message["at"])
            elif kind in ("reopen", "waits", "shard away"):
                self.turns[f"{kind}: {message['why'].partition('(')[0]}"] += 1
            elif kind == "progress":
                self._progress(heard, message)

    def _hear_rogue(self, message: dict[str, Any]) -> None:
        if message["kind"] != "attack":
            return
        self.rogue_busy = False
        self.attacks[f"{message['attack']} {'done' if message['done'] else 'given up'}"] += 1
        self.attacks["tried"] += message["tried"]
        if message["accepted"]:
            self.wrong.append(f"rogue: {message}")
        elif not message["done"]:
            self.turns[f"{message['attack']}: {message['why'].partition('(')[0]}"] += 1

    @staticmethod
    def _progress(heard: Heard, message: dict[str, Any]) -> None:
        counts = message["counts"]
        if counts["tokens"] > heard.counts.get("tokens", 0):
            heard.progressed_at = message["at"]
        heard.counts = counts
        heard.moved_at, heard.oldest = message.get("moved_at"), message.get("oldest", "")
        heard.reports.append((message["at"], message["session"], message["held"]))

    def counts(self) -> Counter[str]:
        """Counts over all engines and lives."""
        with self.lock:
            total: Counter[str] = Counter()
            for heard in self.engines.values():
                total.update(heard.totals)
                total.update(heard.counts)
        return total

    # What is seen

    @property
    def last(self) -> Sample:
        """The newest sample."""
        return self.samples[-1] if self.samples else Sample(0.0, False, 0, 0, 0)

    def ready_since(self, moment: float) -> bool:
        """Whether the pool was seen READY after `moment`, and is."""
        return self.last.ready and self.last.at > moment and time.monotonic() - self.last.at < 1.0

    def all_progressed(self, moment: float, names: list[str]) -> bool:
        """Whether these engines have computed something after `moment`."""
        with self.lock:
            return all(self.engines[name].progressed_at > moment for name in names)

    def all_moved(self, moment: float, names: list[str]) -> list[str]:
        """Sequences of these engines that have not gone on since `moment`."""
        with self.lock:
            return [
                f"{name} {heard.oldest}"
                for name in names
                if (heard := self.engines[name]).moved_at is not None and heard.moved_at <= moment
            ]

    def drained(self, moment: float, names: list[str]) -> list[str]:
        """Engines that have not said, after `moment`, that they hold nothing."""
        with self.lock:
            return [name for name in names if self.engines[name].drained_at <= moment]

    def frozen(self, moment: float, names: list[str]) -> bool:
        """Whether these engines have said, after `moment`, that they ask for nothing."""
        with self.lock:
            return all(self.engines[name].frozen_at > moment for name in names)

    def may_hold(self, now: float) -> int:
        """Most blocks that live engines can hold by their own words."""
        total = ROGUE_BLOCKS
        with self.lock:
            for heard in self.engines.values():
                most: dict[int, int] = {}
                for at, session, held in heard.reports:
                    if now - at < 1.5 or at == heard.reports[-1][0]:
                        most[session] = max(most.get(session, 0), held)
                total += sum(most.values())
        return total

    def waited_ready(self, moment: float) -> float:
        """Seconds since `moment` in which the pool was READY."""
        then = 0.0
        for at, seconds in reversed(self._ready_seconds):
            then = seconds
            if at <= moment:
                break
        return self._ready_seconds[-1][1] - then

    def close(self) -> None:
        """No more samples."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        request = cache_pb2.GetPoolRequest(pool_id="default")
        channel = connect(self._address)
        control = GrpcCacheControl(channel, 0.5)
        failed = 0
        while not self._ended.wait(SAMPLE_SECONDS):
            at = time.monotonic()
            try:
                pool = control.get_pool(request).pool
                failed = 0
            except KvplaneError:
                self.samples.append(Sample(at, False, 0, 0, 0))
                self._count_ready(at, False)
                failed += 1
                if failed == 5:  # a channel waits longer and longer between attempts
                    channel.close()
                    channel, failed = connect(self._address), 0
                    control = GrpcCacheControl(channel, 0.5)
                continue
            connected = sum(shard.connected for shard in pool.shards)
            ready = pool.state == types_pb2.POOL_STATE_READY and connected == NUM_SHARDS
            in_use = pool.stats.held_blocks + pool.stats.quarantined_blocks
            self.samples.append(Sample(at, ready, in_use, pool.pool_epoch, pool.stats.evicted_blocks))
            self._count_ready(at, ready)
        channel.close()

    def _count_ready(self, at: float, ready: bool) -> None:
        before, seconds = self._ready_seconds[-1]
        self._ready_seconds.append((at, seconds + (at - before if ready else 0.0)))


class Prober:
    """Knows which blocks of the shared prefixes are published, by looking them up."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._prefixes = prefixes(seed)
        self._session: Session | None = None
        self._namespaces: dict[str, int] = {}

    def published(self) -> set[tuple[str, tuple[int, ...]]] | None:
        """Blocks, each named by its namespace and all tokens up to its end; None when the service did not answer."""
        for _ in range(2):
            try:
                return self._look()
            except UnavailableError:
                return None
            except KvplaneError:
                self.close()
        return None

    def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(KvplaneError):
                session.close()

    def _look(self) -> set[tuple[str, tuple[int, ...]]]:
        if self._session is None:
            self._session = Session.open(
                mode="remote",
                address=self._address,
                ttl_seconds=TTL_SECONDS,
                max_sequences=1,
                engine_name="prober",
                timeout=2.0,
            )
            self._namespaces = {
                name: self._session.register_namespace(sub_salt=salt) if name else 0 for name, salt in SUB_SALTS.items()
            }
        found = set()
        for name, namespace_id in self._namespaces.items():
            for prefix in self._prefixes:
                # One token more than is asked about: the last one never hits.
                hit = self._session.lookup([*prefix, 0], namespace_id).tokens
                found |= {(name, tuple(prefix[:end])) for end in range(BLOCK_TOKENS, hit + 1, BLOCK_TOKENS)}
        return found
