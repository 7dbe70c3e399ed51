"""An engine's lease on the wire: epochs, stored answers, notices, revocations, processes."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from kvplane.cache.core import Declared, SequenceState, Session, StepResult
from kvplane.cache.core.arrays import I64, U64
from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import InvalidArgumentError, KvplaneError, StaleEpochError
from kvplane.wire.packed import unpack_u64

Push = Callable[[cache_pb2.StepResponse], None]
"""Puts an unasked message on a session's open stream."""


@dataclass(slots=True, eq=False)
class DeclarationParts:
    """The parts of a declaration that have come on one stream."""

    sequences: list[Declared] = field(default_factory=list)
    deferred: list[tuple[int, I64, U64]] = field(default_factory=list)
    num_deferred: int = 0


@dataclass(slots=True, eq=False)
class EngineSession:
    """What the service knows of a session beside the core's part of it."""

    core: Session
    pool_id: str
    mode: "types_pb2.SessionMode.ValueType"
    num_ranks: int
    engine_name: str
    tenant_id: str
    namespace_id: int
    """The core's id of the namespace of sequences that name none."""
    resume_token: bytes
    secret: bytes
    """What the engine shows to compute services."""
    lease_epoch: int = 1
    stream_epoch: int = 1
    published_step: int = 0
    grant_number: int = 0
    step_lease: int = 1
    """Lease epoch that the newest step came under: its engine knows the tables that were granted under it."""
    declared: bool = True
    """Not so after a restart of the control plane, until the engine has said what it holds."""
    declaration: DeclarationParts = field(default_factory=DeclarationParts)
    declaration_answer: cache_pb2.StepResponse | None = None
    """Sent again on every new stream until the first step: the engine has acted on it then."""
    fenced: bool = False
    """After the end of the lease: every shard has fenced it."""
    answers: dict[int, cache_pb2.StepResponse] = field(default_factory=dict)
    """Answers that the engine has not confirmed, by step."""
    notices: dict[int, cache_pb2.StepResponse] = field(default_factory=dict)
    revocations: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Sequences of each revocation that is not acknowledged."""
    stalled: dict[int, float] = field(default_factory=dict)
    """Running sequences that lack slots, and since when."""
    processes: set[tuple[int, int, int]] = field(default_factory=set)
    """Attached processes that live: (shard rank, process id, start ticks)."""
    drained_ranks: set[int] = field(default_factory=set)
    """Shards that have said, after the end of the lease, that nothing of the session runs any more."""
    push: Push | None = None
    close_stream: Callable[[KvplaneError], None] | None = None
    _completed: list[int] = field(init=False)
    """Newest completed step of each rank."""
    _last_notice: int = 0

    def __post_init__(self) -> None:
        self._completed = [0] * self.num_ranks

    @property
    def session_id(self) -> int:
        """Identity."""
        return self.core.session_id

    @property
    def needs_reset_grant(self) -> bool:
        """Whether a resumed engine has to hand its shards all tables again: grants of an older lease are refused."""
        remote = self.mode == types_pb2.SESSION_MODE_REMOTE
        return remote and self.declared and self.step_lease != self.lease_epoch

    def check_epoch(self, lease_epoch: int) -> None:
        """Raises `StaleEpochError` unless the caller knows the newest lease."""
        if lease_epoch != self.lease_epoch:
            raise StaleEpochError(
                f"lease epoch {lease_epoch} of session {self.session_id} was replaced by {self.lease_epoch}",
                metadata={"lease_epoch": str(self.lease_epoch)},
            )

    def completed_step(self, packed: bytes) -> int:
        """Newest step that has completed on every rank. Raises `InvalidArgumentError`; changes nothing."""
        if len(packed) == 8 and self.num_ranks == 1:
            step = int.from_bytes(packed, "little")
            if step >= self._completed[0]:
                return step
        if not packed:
            return min(self._completed)
        steps = unpack_u64("step.completed_steps", packed)
        if len(steps) != self.num_ranks:
            raise InvalidArgumentError.of("step.completed_steps", f"has {len(steps)} ranks, not {self.num_ranks}")
        for rank, (old, new) in enumerate(zip(self._completed, steps.tolist(), strict=True)):
            if new < old:
                raise InvalidArgumentError.of(f"step.completed_steps[{rank}]", f"falls from {old} to {new}")
        return int(steps.min())

    def declared_steps(self, completed: list[int]) -> None:
        """The engine has said what it holds, and which steps have completed on each rank."""
        self.declared, self._completed, self.declaration = True, completed, DeclarationParts()

    def note_applied(self, step: step_pb2.Step) -> None:
        """A step was applied: keep what it said of completed steps, drop what it has confirmed."""
        self.declaration_answer, self.step_lease = None, self.lease_epoch
        if step.completed_steps:
            self._completed = list(struct.unpack(f"<{self.num_ranks}Q", step.completed_steps))
        if step.acknowledged_revocations:
            for revocation in unpack_u64("step.acknowledged_revocations", step.acknowledged_revocations).tolist():
                self.revocations.pop(revocation, None)
        self.confirm(step.last_seen_step, step.last_seen_notice)

    def note_stalls(self, result: StepResult, now: float) -> None:
        """Keep which sequences lack slots: those that got some, or changed their state, do no more."""
        for tables in result.tables if self.stalled else ():
            for sequence_id in tables.sequence_ids.tolist():
                self.stalled.pop(sequence_id, None)
        for change in result.states:
            if change.state == SequenceState.STALLED:
                self.stalled.setdefault(change.sequence_id, now)
            else:
                self.stalled.pop(change.sequence_id, None)

    def confirm(self, last_seen_step: int, last_seen_notice: int) -> None:
        """Drop what the engine has acted on."""
        for step_id in [step_id for step_id in self.answers if step_id <= last_seen_step]:
            del self.answers[step_id]
        if self.notices:
            for notice_id in [notice_id for notice_id in self.notices if notice_id <= last_seen_notice]:
                del self.notices[notice_id]

    def drained_sequences(self, packed: bytes) -> tuple[int, ...]:
        """Sequences of the revocations that a step acknowledges. Raises `InvalidArgumentError` for an unknown one."""
        sequences: list[int] = []
        for index, revocation in enumerate(unpack_u64("step.acknowledged_revocations", packed).tolist()):
            if revocation not in self.revocations:
                raise InvalidArgumentError.of(
                    f"step.acknowledged_revocations[{index}]", f"revocation {revocation} is not open"
                )
            sequences.extend(self.revocations[revocation])
        return tuple(sequences)

    def respond(self) -> cache_pb2.StepResponse:
        """A response with this session's epochs."""
        return cache_pb2.StepResponse(stream_epoch=self.stream_epoch, lease_epoch=self.lease_epoch)

    def notify(self, notice: cache_pb2.Notice) -> None:
        """Tell the engine something it did not ask for; kept until it is confirmed."""
        self._last_notice += 1
        notice.notice_id = self._last_notice
        response = self.respond()
        response.notice.CopyFrom(notice)
        self.notices[self._last_notice] = response
        if self.push is not None:
            self.push(response)

    def revoke(self, preemptions: list[step_pb2.Preemption]) -> None:
        """Tell the engine that sequences must yield for another session."""
        revocation_id = self._last_notice + 1
        self.revocations[revocation_id] = tuple(each.sequence_id for each in preemptions)
        revocation = cache_pb2.Revocation(revocation_id=revocation_id, preemptions=preemptions)
        self.notify(cache_pb2.Notice(revocation=revocation))
