"""Random engines against the oracle: several sessions, forks, rollbacks, preemptions, late acknowledgements.

Every invariant is at stake in every step: I1 by counting on both sides, I2, I3, I4, I5 and I9 by the oracle's
bytes and occupants, I6 and I7 by steps that are stale or repeated, I8 by sessions that end, I10 by replay.
"""

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core_driver import model, pack, u32, u64
from kvplane.cache.core import (
    Admit,
    Advance,
    CacheCore,
    CoreConfig,
    Finish,
    Fork,
    Lengths,
    Observe,
    PoolStatistics,
    Step,
    TransferAck,
)
from kvplane.cache.core.integrity import check_integrity
from oracle import Oracle

SIZE = 4
ROWS = 6


class Client:
    """An engine's own knowledge: it acts on answers it has read, but says so late."""

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        self.step_id = 0
        self.completed = 0
        self.serials = [0] * ROWS
        self.rows: dict[int, int] = {}
        self.running: set[int] = set()
        self.waiting: set[int] = set()
        self.revoked: set[int] = set()
        self.copies: list[int] = []
        self.lost_at: dict[int, int] = {}

    def new_id(self) -> int | None:
        free = [row for row in range(ROWS) if row not in self.rows]
        if not free:
            return None
        row = free[0]
        self.serials[row] += 1
        self.rows[row] = self.serials[row] << 32 | row
        return self.rows[row]


class Pool(RuleBasedStateMachine):
    """One pool, small enough to be always short of blocks."""

    @initialize(
        num_blocks=st.integers(8, 30),
        watermark=st.sampled_from([0.0, 0.1]),
        sessions=st.integers(1, 3),
        patience=st.sampled_from([0.0, 5.0]),
    )
    def open(self, num_blocks: int, watermark: float, sessions: int, patience: float) -> None:
        self.config = CoreConfig(
            num_blocks=num_blocks,
            model=model(SIZE),
            watermark=watermark,
            max_new_blocks_per_sequence=6,
            writer_patience_seconds=patience,
            max_bypasses=4,
        )
        self.core = CacheCore(self.config)
        self.oracle = Oracle(num_blocks, SIZE)
        self.now = 0.0
        self.clients: list[Client] = []
        self.seals: list[tuple[int, int]] = []
        for _ in range(sessions):
            self._open()

    def _open(self) -> None:
        session = self.core.open_session(self.now, max_sequences=ROWS, ttl_seconds=300.0)
        self.clients.append(Client(session.session_id))

    def _step(self, client: Client, lag: int, complete: int, **operations: Any) -> Any:
        client.step_id += 1
        last_seen = max(client.step_id - 1 - lag, client.completed, 0)
        client.completed = min(client.completed + complete, last_seen)
        self.now += 0.01
        step = Step(client.step_id, last_seen_step=last_seen, completed_step=client.completed, **operations)
        result = self.core.step(client.session_id, step, self.now)
        assert self.core.step(client.session_id, step, self.now) is result, "I7: a repeated step acted again"
        self.oracle.stepped(client.session_id, step, result)
        self._count(result.statistics)
        client.copies += [copy.op_id for copy in result.copies]
        for change in result.states:
            if change.state.name in ("WAITING", "PREEMPTED"):
                client.running.discard(change.sequence_id)
                client.waiting.add(change.sequence_id)
                client.lost_at[change.sequence_id] = client.step_id
            elif change.state.name == "RUNNING":
                client.running.add(change.sequence_id)
        for admission in result.admissions:
            client.waiting.discard(admission.sequence_id)
            client.running.add(admission.sequence_id)
        for preemption in result.preemptions:
            if preemption.session_id != client.session_id:
                victim = next(each for each in self.clients if each.session_id == preemption.session_id)
                victim.running.discard(preemption.sequence_id)
                victim.revoked.add(preemption.sequence_id)
                victim.lost_at.pop(preemption.sequence_id, None)
        return result

    def _client(self, data: st.DataObject) -> Client:
        return data.draw(st.sampled_from(self.clients), label="client")

    def _lengths(self, client: Client, sequence: int) -> tuple[int, int, int]:
        tracked = self.oracle.sequences[client.session_id, sequence]
        return tracked.committed, len(tracked.tokens), len(tracked.table) * SIZE

    @rule(
        data=st.data(),
        prefix=st.integers(0, 2),
        shared=st.integers(0, 24),
        own=st.integers(0, 12),
        read=st.booleans(),
        write=st.sampled_from([True, True, True, False]),
        chunk=st.sampled_from([0, 0, 3, 9]),
        lag=st.integers(0, 3),
    )
    def admit(
        self,
        data: st.DataObject,
        prefix: int,
        shared: int,
        own: int,
        read: bool,
        write: bool,
        chunk: int,
        lag: int,
    ) -> None:
        client = self._client(data)
        tokens = [prefix] * shared + data.draw(st.lists(st.integers(0, 1), min_size=own, max_size=own))
        tokens = tokens[: (self.config.num_blocks - 1) * SIZE] or [1]
        sequence = client.new_id()
        asked = client.waiting | (client.revoked & set(client.rows.values()))
        asks = [Admit(waiting, num_slots=chunk) for waiting in sorted(asked)]
        if sequence is not None:
            client.waiting.add(sequence)
            asks.append(Admit(sequence, pack(tokens), 0, chunk, read_cache=read, write_cache=write))
        asks = data.draw(st.permutations(asks), label="order")
        self._step(client, lag, data.draw(st.integers(0, 3)), admit=tuple(asks))

    @rule(data=st.data(), rounds=st.integers(1, 4), seals=st.sampled_from([True, True, False]))
    def serve(self, data: st.DataObject, rounds: int, seals: bool) -> None:
        """An engine at work: everything known is written, sequences grow, some end, others come."""
        client = self._client(data)
        for _ in range(rounds):
            ids = sorted(client.running)
            if ids:
                _, known, cover = np.array([self._lengths(client, each) for each in ids]).T
                written = np.minimum(known, cover).astype(np.uint32)
                self._step(client, 0, 9, commit=Lengths(u64(*ids), written))
            done = [each for each in ids if data.draw(st.integers(0, 2), label="ends") == 0]
            if done:
                self._finish(client, done, 0, 9)
            ids = sorted(client.running)
            if ids:
                _, known, cover = np.array([self._lengths(client, each) for each in ids]).T
                counts = np.array([data.draw(st.integers(1, 5), label="tokens") for _ in ids])
                self._step(
                    client,
                    0,
                    9,
                    observe=Observe(u64(*ids), counts.astype(np.uint32), np.zeros(counts.sum(), np.uint32)),
                    extend=Lengths(u64(*ids), np.minimum(known + counts, cover + 24).astype(np.uint32)),
                )
            sequence = client.new_id()
            new: list[Admit] = []
            if sequence is not None:
                client.waiting.add(sequence)
                length = data.draw(st.integers(1, 24), label="prompt")
                new.append(Admit(sequence, pack([data.draw(st.integers(0, 1), label="head")] * length)))
            known_ids = sorted(client.waiting - {sequence})
            self._step(client, 0, 9, admit=(*(Admit(each) for each in known_ids), *new))
            if seals:
                self.take_seals()
                while self.seals:
                    self._acknowledge(0, True, data)
                if data.draw(st.booleans(), label="look"):
                    self.look()

    @precondition(lambda self: any(client.running for client in self.clients))
    @rule(data=st.data(), lag=st.integers(0, 3), complete=st.integers(0, 3), packed=st.booleans())
    def decode(self, data: st.DataObject, lag: int, complete: int, packed: bool) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.running]))
        named = data.draw(st.lists(st.sampled_from(sorted(client.running)), min_size=1, unique=True))
        committed, known, cover = np.array([self._lengths(client, each) for each in named]).T
        ids = u64(*named)
        slots = np.maximum(known + 1, cover) + data.draw(st.integers(0, 5))
        slots = np.minimum(slots, cover + 6 * SIZE).astype(np.uint32)
        if packed:
            written = np.minimum(known, cover)
            lengths = [data.draw(st.integers(*pair)) for pair in zip(committed.tolist(), written.tolist(), strict=True)]
            tokens = u32(*[data.draw(st.integers(0, 1)) for _ in named])
            self._step(client, lag, complete, advance=Advance(ids, tokens, u32(*lengths), slots))
            return
        counts = u32(*[data.draw(st.integers(1, 4)) for _ in named])
        tokens = u32(*[data.draw(st.integers(0, 1)) for _ in range(int(counts.sum()))])
        written = np.minimum(known + counts, cover)
        lengths = [data.draw(st.integers(*pair)) for pair in zip(committed.tolist(), written.tolist(), strict=True)]
        self._step(
            client,
            lag,
            complete,
            observe=Observe(ids, counts, tokens),
            commit=Lengths(ids, u32(*lengths)),
            extend=Lengths(ids, slots),
        )

    @precondition(lambda self: any(client.running for client in self.clients))
    @rule(data=st.data(), complete=st.integers(0, 3))
    def rollback(self, data: st.DataObject, complete: int) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.running]))
        sequence = data.draw(st.sampled_from(sorted(client.running)))
        committed, known, _ = self._lengths(client, sequence)
        length = data.draw(st.integers(max(committed, 1), max(known, 1)))
        self._step(client, 0, complete, rollback=Lengths(u64(sequence), u32(length)))

    @precondition(lambda self: any(client.running for client in self.clients))
    @rule(data=st.data(), complete=st.integers(0, 3), slots=st.integers(0, 3))
    def fork(self, data: st.DataObject, complete: int, slots: int) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.running]))
        parent = data.draw(st.sampled_from(sorted(client.running)))
        child = client.new_id()
        if child is None:
            return
        _, known, _ = self._lengths(client, parent)
        self._step(
            client,
            0,
            complete,
            forks=(Fork(parent, (child,)),),
            extend=Lengths(u64(child), u32(min(known + slots, 6 * SIZE))),
        )

    @precondition(lambda self: any(client.rows for client in self.clients))
    @rule(data=st.data(), lag=st.integers(0, 3), complete=st.integers(0, 3))
    def finish(self, data: st.DataObject, lag: int, complete: int) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.rows]))
        named = data.draw(st.lists(st.sampled_from(sorted(client.rows.values())), min_size=1, unique=True))
        self._finish(client, named, lag, complete)

    def _finish(self, client: Client, named: list[int], lag: int, complete: int) -> None:
        self._step(client, lag, complete, finish=Finish(u64(*named), u32(*[1] * len(named))))
        for sequence in named:
            del client.rows[sequence & 0xFFFF_FFFF]
            for known in (client.running, client.waiting):
                known.discard(sequence)

    @rule(data=st.data(), complete=st.integers(0, 4))
    def idle(self, data: st.DataObject, complete: int) -> None:
        self._step(self._client(data), 0, complete)

    @precondition(lambda self: any(client.copies for client in self.clients))
    @rule(data=st.data(), succeeded=st.sampled_from([True, True, False]))
    def acknowledge_copies(self, data: st.DataObject, succeeded: bool) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.copies]))
        acks = tuple(TransferAck(op_id, succeeded) for op_id in client.copies)
        client.copies = []
        self._step(client, 0, 0, transfers=acks)

    @precondition(lambda self: any(client.revoked for client in self.clients))
    @rule(data=st.data(), complete=st.integers(0, 3))
    def acknowledge_revocations(self, data: st.DataObject, complete: int) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.revoked]))
        drained = tuple(sorted(client.revoked))
        client.revoked.clear()
        client.waiting |= {each for each in drained if each in client.rows.values()}
        self._step(client, 0, complete, drained=drained)

    @precondition(lambda self: any(client.revoked or client.lost_at for client in self.clients))
    @rule(data=st.data())
    def name_what_is_not_known_to_be_preempted(self, data: st.DataObject) -> None:
        """I6: an operation on a sequence whose preemption the sender has not seen is skipped."""
        client = self._client(data)
        seen = max(client.step_id - 3, client.completed)
        unseen = {each for each in client.waiting if client.lost_at.get(each, 0) > seen}
        # A revocation is told by a notice, or by the refusal of an ask for it.
        unseen |= {each for each in client.revoked if client.lost_at.get(each, seen + 1) > seen}
        named = sorted(unseen & set(client.rows.values()))
        if not named:
            return
        lengths = u32(*[1] * len(named))
        result = self._step(client, 3, 0, extend=Lengths(u64(*named), lengths))
        assert {each.sequence_id for each in result.skipped} == set(named)

    @rule()
    def take_seals(self) -> None:
        batch = self.core.take_seals()
        if batch is not None:
            self.oracle.seals_taken(batch)
            self.seals.append((batch.seal_id, len(batch.block_ids)))

    @precondition(lambda self: self.seals)
    @rule(data=st.data(), everything=st.sampled_from([True, True, True, False]))
    def acknowledge_seals(self, data: st.DataObject, everything: bool) -> None:
        self._acknowledge(data.draw(st.integers(0, len(self.seals) - 1)), everything, data)

    def _acknowledge(self, which: int, everything: bool, data: st.DataObject) -> None:
        seal_id, count = self.seals.pop(which)
        sealed = [True] * count
        if not everything:
            sealed = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        self.core.acknowledge_seals(seal_id, None if everything else np.array(sealed))
        self.oracle.seals_acknowledged(seal_id, sealed)

    @rule(rarely=st.integers(0, 3))
    def reset(self, rarely: int) -> None:
        if rarely:
            return
        self.core.reset()
        self.oracle.reset()

    @rule(data=st.data())
    def replace_a_session(self, data: st.DataObject) -> None:
        client = self._client(data)
        self.clients.remove(client)
        self.core.end_session(client.session_id)
        self.oracle.session_ended(client.session_id)
        self.core.check_integrity()
        if data.draw(st.booleans(), label="drained"):
            self.core.session_drained(client.session_id)
            self.oracle.session_drained(client.session_id, client.copies)
        self._open()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "core"):
            return
        # Not the core's own methods: they would first index what is acknowledged, which must not matter.
        check_integrity(self.core.state)
        self._count(self.core.state.statistics())

    def _count(self, statistics: PoolStatistics) -> None:
        counts = self.oracle.counts()
        assert statistics.free == counts["free"], f"I1: {statistics} is not {counts}"
        held = statistics.held + statistics.cached + statistics.quarantined
        assert held == self.config.num_blocks - 1 - counts["free"], f"I1: {statistics} is not {counts}"

    @rule()
    def look(self) -> None:
        """Everything acknowledged is indexed when somebody asks, and then the counts agree one by one."""
        statistics = self.core.statistics()
        self.core.check_integrity()
        counts = {
            "held": statistics.held,
            "quarantined": statistics.quarantined,
            "cached": statistics.cached,
            "free": statistics.free,
        }
        assert counts == self.oracle.counts(), f"I1: {counts} are not {self.oracle.counts()}"


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
