"""An engine on the wire, checked by the oracle: builds steps with `struct`, keeps tables, tells the oracle everything.

It works over `CacheControl`, so the same test runs over gRPC and in process.
"""

import struct
from collections.abc import Callable, Iterable
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import KvplaneError
from kvplane.wire.interface import CacheControl, StepStream
from kvplane.wire.status import from_status
from oracle import Oracle
from tensorless_shard import model_message

BLOCK = 16
RowReader = Callable[[int], tuple[bytes, int] | None]
"""Digest and generation in a block's directory row; None where there is no directory."""


def u32(values: Iterable[int]) -> bytes:
    """Packed u32."""
    values = list(values)
    return struct.pack(f"<{len(values)}I", *values)


def u64(values: Iterable[int]) -> bytes:
    """Packed u64."""
    values = list(values)
    return struct.pack(f"<{len(values)}Q", *values)


def ids(packed: bytes) -> list[int]:
    """Unpacked u64."""
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def numbers(packed: bytes) -> list[int]:
    """Unpacked u32."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def sequence_id(row: int, serial: int = 1) -> int:
    """`serial ‖ row`."""
    return serial << 32 | row


def new_sequence(identity: int, tokens: Iterable[int], **options: Any) -> step_pb2.NewSequence:
    """A sequence to admit."""
    return step_pb2.NewSequence(sequence_id=identity, tokens=u32(tokens), **options)


def admit(*sequences: step_pb2.NewSequence, again: Iterable[int] = (), **options: Any) -> step_pb2.Admit:
    """Admit new sequences, then known ones."""
    order = [each.sequence_id for each in sequences] + list(again)
    return step_pb2.Admit(sequences=sequences, order=u64(order), **options)


A, B, C = sequence_id(0), sequence_id(1), sequence_id(2)


def commit(*pairs: tuple[int, int]) -> step_pb2.Commit:
    """Commit sequences up to lengths."""
    return step_pb2.Commit(sequence_ids=u64(each for each, _ in pairs), num_tokens=u32(each for _, each in pairs))


def finish(*sequences: int) -> step_pb2.Finish:
    """Finish sequences."""
    return step_pb2.Finish(sequence_ids=u64(sequences), reasons=u32([step_pb2.FINISH_REASON_STOP] * len(sequences)))


def advance(token: int, *rows: tuple[int, int, int]) -> step_pb2.Advance:
    """One token for each (sequence, committed, slots)."""
    return step_pb2.Advance(
        sequence_ids=u64(row[0] for row in rows),
        tokens=u32([token] * len(rows)),
        num_committed=u32(row[1] for row in rows),
        num_slots=u32(row[2] for row in rows),
    )


class Rejected(Exception):  # noqa: N818 - an answer, not a failure of the test
    """The step was refused."""

    def __init__(self, error: KvplaneError) -> None:
        super().__init__(error.message)
        self.error = error


class WireEngine:
    """One session. Steps are numbered, answered, parsed, and told to the oracle, if there is one."""

    def __init__(
        self,
        control: CacheControl,
        oracle: Oracle | None = None,
        row: RowReader | None = None,
        *,
        mode: "types_pb2.SessionMode.ValueType" = types_pb2.SESSION_MODE_ATTACHED,
        **options: Any,
    ) -> None:
        self.control = control
        self.oracle = oracle
        self._row = row
        self.opened = control.open_session(
            cache_pb2.OpenSessionRequest(pool_id="default", model=model_message(), mode=mode, **options)
        )
        self.stream: StepStream
        self.step_id = 0
        self.seen = 0
        self.last_seen_notice = 0
        self.notices: list[cache_pb2.Notice] = []
        self.result = step_pb2.StepResult()
        self._seals = 0
        self.open_stream()

    @property
    def session_id(self) -> int:
        """Identity of the session."""
        return self.opened.session_id

    def opening(self, **changes: Any) -> cache_pb2.StreamOpen:
        """First message of the session's stream."""
        values: dict[str, Any] = {
            "session_id": self.opened.session_id,
            "lease_epoch": self.opened.lease_epoch,
            "stream_epoch": self.opened.stream_epoch,
            "last_seen_step": self.seen,
            "last_seen_notice": self.last_seen_notice,
        }
        return cache_pb2.StreamOpen(**(values | changes))

    def open_stream(self) -> cache_pb2.StreamOpened:
        """Open the stream (again)."""
        self.stream = self.control.step(self.opening())
        response = self.stream.receive()
        assert response.HasField("opened")
        return response.opened

    def request(self, *, step_id: int | None = None, completed: int | None = None, **operations: Any) -> step_pb2.Step:
        """The next step, or one with another id."""
        if step_id is None:
            self.step_id += 1
            step_id = self.step_id
        done = self.seen if completed is None else completed
        return step_pb2.Step(
            step_id=step_id,
            last_seen_step=self.seen,
            last_seen_notice=self.last_seen_notice,
            completed_steps=u64([done]),
            **operations,
        )

    def send(self, step: step_pb2.Step) -> None:
        """Send without waiting."""
        self.stream.send(cache_pb2.StepRequest(step=step))

    def receive(self) -> step_pb2.StepResult:
        """The next result; notices on the way are kept. Raises `Rejected`."""
        while True:
            response = self.stream.receive()
            if response.HasField("notice"):
                self.notices.append(response.notice)
                self.last_seen_notice = max(self.last_seen_notice, response.notice.notice_id)
                continue
            if response.HasField("rejected"):
                self.seen = max(self.seen, response.rejected.step_id)
                raise Rejected(from_status(response.rejected.status))
            self.seen = response.result.step_id
            self.result = response.result
            return response.result

    def step(self, **operations: Any) -> step_pb2.StepResult:
        """Send a step, wait for its result, tell the oracle."""
        step = self.request(**operations)
        self.send(step)
        result = self.receive()
        if self.oracle is not None:
            self.oracle.stepped(self.session_id, core_step(step), core_result(result, self.session_id))
        return result

    def settle(self) -> None:
        """Wait until everything that was filled is published (empty steps ask), and tell the oracle."""
        for _ in range(2000):
            self.step()
            if self.result.published_step >= self.result.step_id - 1:
                break
        else:
            raise AssertionError("seals are stuck")
        if self.oracle is None or not self.oracle.filled:
            return
        filled, self._seals = self.oracle.filled, self._seals + 1
        rows = [self._sealed(each.block, each.content) for each in filled]
        batch = SimpleNamespace(
            seal_id=(self.session_id, self._seals),
            block_ids=np.array([each.block for each in filled]),
            generations=[generation for _, generation in rows],
            digests=b"".join(digest for digest, _ in rows),
        )
        self.oracle.seals_taken(batch)
        self.oracle.seals_acknowledged(batch.seal_id, [True] * len(filled))

    def _sealed(self, block: int, content: object) -> tuple[bytes, int]:
        found = self._row(block) if self._row is not None else None
        if found is not None:
            return found
        assert self.oracle is not None
        return blake2b(repr(content).encode(), digest_size=32).digest(), self.oracle.newest[block]

    def states(self) -> dict[int, tuple[str, str]]:
        """State and reason of each sequence that changed in the last result."""
        changes = self.result.state_changes
        return {
            sequence: (
                _name(step_pb2.SequenceState, state),
                _name(step_pb2.StateReason, reason),
            )
            for sequence, state, reason in zip(
                ids(changes.sequence_ids), numbers(changes.states), numbers(changes.reasons), strict=True
            )
        }

    def admitted(self) -> dict[int, tuple[int, str]]:
        """Cached tokens and hit reason of each sequence admitted in the last result."""
        found = self.result.admitted
        return {
            sequence: (cached, _name(types_pb2.HitReason, reason))
            for sequence, cached, reason in zip(
                ids(found.sequence_ids), numbers(found.cached_tokens), numbers(found.hit_reasons), strict=True
            )
        }


def core_step(step: Any) -> SimpleNamespace:
    """A step as the oracle reads it."""

    def operation(name: str, *fields: str) -> SimpleNamespace | None:
        if not step.HasField(name):
            return None
        message = getattr(step, name)
        arrays = {field: np.array(numbers(getattr(message, field)), np.int64) for field in fields}
        return SimpleNamespace(sequence_ids=np.array(ids(message.sequence_ids), np.uint64), **arrays)

    known = {each.sequence_id: each for each in step.admit.sequences}
    admits = []
    for identity in ids(step.admit.order):
        new = known.get(identity)
        admits.append(
            SimpleNamespace(
                sequence_id=identity,
                tokens=new.tokens if new else b"",
                namespace_id=new.namespace_id if new else 0,
                read_cache=not (new and new.HasField("read_cache")) or bool(new and new.read_cache),
                write_cache=not (new and new.HasField("write_cache")) or bool(new and new.write_cache),
                max_hit_tokens=new.max_hit_tokens if new and new.HasField("max_hit_tokens") else None,
            )
        )
    return SimpleNamespace(
        step_id=step.step_id,
        completed_step=min(ids(step.completed_steps), default=0),
        transfers=[SimpleNamespace(op_id=ack.op_id) for ack in step.acks],
        drained=(),
        observe=operation("observe", "counts", "tokens"),
        commit=operation("commit", "num_tokens"),
        rollback=operation("rollback", "num_tokens"),
        advance=operation("advance", "tokens", "num_committed", "num_slots"),
        forks=[
            SimpleNamespace(parent_id=fork.parent_sequence_id, child_ids=ids(fork.child_sequence_ids))
            for fork in step.forks
        ],
        finish=operation("finish", "reasons"),
        admit=admits,
    )


def core_result(result: step_pb2.StepResult, session_id: int) -> SimpleNamespace:
    """A result as the oracle reads it."""
    admitted, changes, skipped = result.admitted, result.state_changes, result.skipped
    return SimpleNamespace(
        tables=[
            SimpleNamespace(
                sequence_ids=np.array(ids(delta.sequence_ids), np.uint64),
                starts=np.array(numbers(delta.starts)),
                counts=np.array(numbers(delta.counts)),
                block_ids=np.array(numbers(delta.blocks.block_ids)),
                generations=np.array(ids(delta.blocks.generations), np.uint64),
            )
            for delta in result.table_deltas
        ],
        admissions=[
            SimpleNamespace(sequence_id=sequence, cached_tokens=cached)
            for sequence, cached in zip(ids(admitted.sequence_ids), numbers(admitted.cached_tokens), strict=True)
        ],
        states=[
            SimpleNamespace(sequence_id=sequence, state=SimpleNamespace(name=_name(step_pb2.SequenceState, state)))
            for sequence, state in zip(ids(changes.sequence_ids), numbers(changes.states), strict=True)
        ],
        copies=[
            SimpleNamespace(
                op_id=transfer.op_id,
                source_id=numbers(transfer.source[0].block_ids)[0],
                source_generation=ids(transfer.source[0].generations)[0],
                destination_id=numbers(transfer.destination[0].block_ids)[0],
                destination_generation=ids(transfer.destination[0].generations)[0],
                num_slots=numbers(transfer.slots)[0],
            )
            for transfer in result.transfers
        ],
        skipped=[
            SimpleNamespace(sequence_id=sequence, operation=SimpleNamespace(name=_name(step_pb2.StepOperation, each)))
            for sequence, each in zip(ids(skipped.sequence_ids), numbers(skipped.operations), strict=True)
        ],
        preemptions=[
            SimpleNamespace(
                sequence_id=each.sequence_id, session_id=session_id, reason=SimpleNamespace(name=each.reason)
            )
            for each in result.preemptions
        ],
    )


def _name(enum: Any, number: int) -> str:
    name: str = enum.Name(number)
    for prefix in ("SEQUENCE_STATE_", "STATE_REASON_", "HIT_REASON_", "STEP_OPERATION_"):
        name = name.removeprefix(prefix)
    return name
