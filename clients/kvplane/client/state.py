"""A session without its transport: numbers steps, applies their answers, knows what to send again (design I6, I7).

`Session` and `AsyncSession` move its messages; nothing here blocks, reads a socket or starts a thread.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvplane.client import decode
from kvplane.client.device_work import DeviceWork, TableChanges
from kvplane.client.draft import StepDraft
from kvplane.client.lease import Lease
from kvplane.client.notices import Heard
from kvplane.client.operations import apply_draft
from kvplane.client.redeclaration import after_cuts, apply_cuts, declaration, lost_copies
from kvplane.client.sequences import SequenceTable, row_of
from kvplane.client.values import (
    Cut,
    PoolStats,
    SequenceState,
    StepResult,
)
from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import (
    ForkedProcessError,
    LaunchPausedError,
    LimitExceededError,
    PreconditionError,
    SessionClosedError,
)
from kvplane.wire.packed import pack_u64
from kvplane.wire.status import from_status

MODES = {"attached": types_pb2.SESSION_MODE_ATTACHED, "remote": types_pb2.SESSION_MODE_REMOTE}


@dataclass(slots=True)
class _Pending:
    """A step without an answer."""

    request: cache_pb2.StepRequest
    draft: StepDraft
    sent_at: float

    @property
    def step_id(self) -> int:
        return self.request.step.step_id


class SessionState:
    """One session. Used by one thread at a time (the link's lock): the engine's, which alone changes the tables, or the
    heartbeat's, which may resume and declare while the engine makes and runs plans. `lease` is read by both."""

    def __init__(self, opened: cache_pb2.OpenSessionResponse, mode: str, lease: Lease, num_ranks: int = 1) -> None:
        self.opened = opened
        self.mode = mode
        self.num_ranks = num_ranks
        self.lease = lease
        self.work = DeviceWork(num_ranks)
        self.block_tokens: int = opened.pool.model.block_tokens
        self.sequences = SequenceTable(opened.max_sequences, self.block_tokens, self.work.granted, self.work.released)
        self.last_sent_step = opened.last_applied_step
        self.work.last_step = opened.last_applied_step
        self.published_step = 0
        self.stats = PoolStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self.closed = False
        self._pending: deque[_Pending] = deque()
        self._heard = Heard()
        self._declared_at: int | None = None
        """Newest step that was sent when a declaration went out whose answer was not applied."""
        self._lost: list[Cut] = []
        """What that declaration left out since it was not copied."""
        self.owes_declaration = False
        """The service has resumed the session and does not know yet what it holds."""
        self._process = os.getpid()

    @property
    def session_id(self) -> int:
        """Identity."""
        return self.opened.session_id

    @property
    def lease_epoch(self) -> int:
        """Epoch of the lease."""
        return self.opened.lease_epoch

    @property
    def secret(self) -> bytes:
        """What the engine shows to compute services."""
        return self.opened.session_secret

    @property
    def pool(self) -> types_pb2.Pool:
        """The pool as it was when the session was opened (or declared anew)."""
        return self.opened.pool

    @property
    def limits(self) -> cache_pb2.Limits:
        """Limits of the service."""
        return self.opened.limits

    @property
    def last_step(self) -> int:
        """Newest step whose result was applied."""
        return self.work.last_step

    @property
    def unanswered(self) -> int:
        """Steps that were sent and not answered."""
        return len(self._pending)

    @property
    def idle(self) -> bool:
        """Whether nothing of the session could be lost: no steps on their way, no plans, no sequences."""
        return not self._pending and not self.work.open_plans and not self.sequences.ids.any()

    def check_usable(self) -> None:
        """Raises `SessionClosedError` or `ForkedProcessError`."""
        if self.closed:
            raise SessionClosedError(f"session {self.session_id} was closed")
        if os.getpid() != self._process:
            raise ForkedProcessError(
                f"session {self.session_id} belongs to process {self._process}; open another one in this process"
            )

    # Device work, for compute access

    def track_plans(self) -> None:
        """Completion follows plans from now on, and table changes are kept for `take_changes`, which begins with
        everything that the tables name now: a compute access is new, whatever an earlier one was told."""
        self.work.automatic = True
        self.work.keep_changes()
        table = self.sequences
        for row in table.rows_in_use.tolist():
            held = table.blocks[row, : table.num_blocks[row]]
            real = held != 0
            self.work.granted(held[real].astype("int64"), table.generations[row, : len(held)][real])

    def plan_opened(self) -> int:
        """See `DeviceWork.plan_opened`. Raises `PreconditionError` while a step that was sent to be waited for has no
        answer: what yields in it may be another session's by now."""
        if self._pending and self.work.quiet_until_answered:
            raise PreconditionError("a step that was sent by run has no answer yet; collect it first")
        return self.work.plan_opened()

    def plan_closed(self, token: int) -> None:
        """See `DeviceWork.plan_closed`."""
        self.work.plan_closed(token)

    def take_changes(self) -> TableChanges:
        """See `DeviceWork.take_changes`."""
        return self.work.take_changes()

    def take_grants(self) -> list[step_pb2.Grant]:
        """Grants to pass on to every shard, in order, since the last call."""
        return self.work.take_grants()

    def copies_done(self, op_ids: list[int]) -> None:
        """Copies were launched."""
        self.work.copies_done(op_ids)

    def complete(self, step_id: int, rank: int = 0) -> None:
        """All that was launched on tables up to `step_id` has completed."""
        self.work.complete(step_id, rank)

    @property
    def completed_step(self) -> int:
        """Newest step that has completed on every rank."""
        return self.work.completed_step

    # Steps

    def draft(self) -> StepDraft:
        """A new step."""
        self.check_usable()
        return StepDraft(self.sequences)

    def encode(self, draft: StepDraft, *, overlapped: bool = True) -> cache_pb2.StepRequest:
        """Number a step; `overlapped` unless nothing is launched before its answer is read. Raises `LimitExceededError`
        when too many have no answer, and changes nothing then."""
        self.check_usable()
        if len(self._pending) >= self.limits.unanswered_steps:
            raise LimitExceededError(
                f"{len(self._pending)} steps have no answer; collect one first",
                metadata={"limit": "unanswered_steps", "value": str(self.limits.unanswered_steps)},
            )
        draft.take()
        if self._heard.cuts:
            # Made without knowing them: they are told with the next result.
            draft = after_cuts(draft, self._heard.kept, self.sequences)
        return self._number(draft, overlapped=overlapped)

    def _number(self, draft: StepDraft, *, overlapped: bool = True) -> cache_pb2.StepRequest:
        request = cache_pb2.StepRequest()
        step = request.step
        draft.write(step)
        self.last_sent_step += 1
        step.step_id = self.last_sent_step
        step.last_seen_step = self.last_step
        step.last_seen_notice = self._heard.last_seen_notice
        step.completed_steps = pack_u64(self.work.tell_completed(overlapped=overlapped))
        for op_id in self.work.take_acks():
            step.acks.add(op_id=op_id, success_bitmap=b"\x01")
        revocations = self.work.take_revocations()
        if revocations:
            step.acknowledged_revocations = pack_u64(revocations)
        self._pending.append(_Pending(request, draft, self.lease.clock()))
        return request

    def opening(self) -> cache_pb2.StepRequest:
        """First message of a stream."""
        return cache_pb2.StepRequest(
            open=cache_pb2.StreamOpen(
                session_id=self.session_id,
                lease_epoch=self.lease_epoch,
                stream_epoch=self.opened.stream_epoch,
                last_seen_step=self.last_step,
                last_seen_notice=self._heard.last_seen_notice,
            )
        )

    def stream_opened(self, opened: cache_pb2.StreamOpened) -> list[cache_pb2.StepRequest]:
        """A stream is open (again): what has to be sent again. Steps that were applied are answered unasked."""
        if opened.HasField("grant"):
            self.work.keep_grant(opened.grant, reset=True)
        return [each.request for each in self._pending if each.step_id > opened.last_applied_step]

    # A restarted service

    def resume_request(self) -> cache_pb2.OpenSessionRequest:
        """A request for the same session from a service that does not know its lease any more."""
        return cache_pb2.OpenSessionRequest(pool_id=self.pool.pool_id, resume_token=self.opened.resume_token)

    def resumed(self, opened: cache_pb2.OpenSessionResponse, sent_at: float) -> None:
        """The session has a new lease epoch; `declaration_required` says that the service was restarted."""
        self.opened = opened
        self.owes_declaration = opened.declaration_required
        self.lease.renew(sent_at)
        if opened.declaration_required:
            self._heard.restarted()

    @property
    def awaits_declared(self) -> bool:
        """Whether a declaration went out whose answer was not applied: a service that asks for no other has taken it,
        and sends the answer again."""
        return self._declared_at is not None

    def check_declared(self) -> None:
        """To be called when a plan is made, once it counts as open. Raises `LaunchPausedError` while a restarted
        service was told what the session holds and the tables do not show yet what that came to."""
        if self.awaits_declared:
            raise LaunchPausedError(
                "the cache service was restarted; the next result says what of the session's tables is left",
                metadata={"session_id": str(self.session_id)},
            )

    def declaration(self) -> Iterator[cache_pb2.StepRequest]:
        """What the service is told when it asks for a declaration. Another thread may make and run plans meanwhile."""
        # First: a plan that is made from now on is refused, one that was made before counts as not completed.
        self._declared_at = self.last_sent_step
        self._lost = lost_copies(self.sequences, self.work)
        return declaration(self.sequences, self.work, self.last_sent_step, self._lost)

    def declared(self, result: cache_pb2.DeclarationResult) -> list[cache_pb2.StepRequest]:
        """The declaration was taken: shorten what was cut; returns the steps without an answer, numbered anew."""
        declared_at, self._declared_at = self._declared_at, None
        if declared_at is None:
            raise PreconditionError("no declaration awaits an answer")
        for cut in self._lost:
            row = self.sequences.row(cut.sequence_id)
            self.sequences.committed[row] = min(int(self.sequences.committed[row]), cut.num_slots)
        self._heard.cuts += self._lost + apply_cuts(self.sequences, result)
        self._lost = []
        self.work.forget_operations()
        # Steps that were made since, while no stream was open, are numbered behind the declaration as well.
        self.last_sent_step = self.work.last_step = declared_at
        if result.HasField("grant"):
            self.work.keep_grant(result.grant, reset=True)
        pending, self._pending = self._pending, deque()
        kept = self._heard.kept
        return [self._number(after_cuts(each.draft, kept, self.sequences)) for each in pending]

    def receive(self, response: cache_pb2.StepResponse) -> StepResult | None:
        """Apply one message; a result when it is the answer to the oldest step, None for anything else.

        Raises the error of a rejected step, which changed nothing. Messages of an older stream or lease are dropped.
        """
        if response.lease_epoch != self.lease_epoch or response.stream_epoch != self.opened.stream_epoch:
            return None
        kind = response.WhichOneof("message")
        if kind == "notice":
            self._heard.note(response.notice, self.sequences)
            return None
        if kind == "rejected":
            refused = self._answered(response.rejected.step_id)
            if refused is not None:
                refused.draft.give_rows_back()
                raise from_status(response.rejected.status)
            return None
        if kind != "result":
            return None
        answered = self._answered(response.result.step_id)
        return None if answered is None else self._apply(answered.draft, response.result)

    def _answered(self, step_id: int) -> _Pending | None:
        if not self._pending or self._pending[0].step_id != step_id:
            return None  # repeated: it was applied before the stream broke
        pending = self._pending.popleft()
        self.lease.renew(pending.sent_at)
        self.work.last_step = step_id
        return pending

    def _apply(self, draft: StepDraft, result: step_pb2.StepResult) -> StepResult:
        skipped = decode.skipped(result.skipped)
        apply_draft(self.sequences, draft, skipped)
        deltas: Iterable[types_pb2.TableDelta] = result.table_deltas
        if result.HasField("grant"):
            body = step_pb2.GrantBody.FromString(result.grant.body)
            deltas = body.table_deltas
            self.work.keep_grant(result.grant, body.reset)
        for delta in deltas:
            self.sequences.apply(delta)
        admitted = decode.admissions(result.admitted)
        for admission in admitted:
            self.sequences.admit(row_of(admission.sequence_id), admission.cached_tokens)
        changes = decode.state_changes(result.state_changes)
        for change in changes:
            self._change(change.sequence_id, change.state)
        copies = decode.copies(result.transfers, result.step_id)
        self.work.copies_told(copies)
        self.published_step = result.published_step
        self.stats = decode.pool_stats(result.stats)
        told = self._heard.tell(self.work)
        return StepResult(
            result.step_id,
            result.published_step,
            self.stats,
            admitted,
            changes,
            decode.preemptions(result.preemptions),
            told.revocations,
            skipped,
            copies,
            told.notices,
            told.cuts,
        )

    def with_heard(self, result: StepResult) -> StepResult:
        """A result with the notices that came behind it: what the tables show, the engine is told."""
        return self._heard.added_to(result, self.work)

    def _change(self, sequence_id: int, state: SequenceState) -> None:
        row = row_of(sequence_id)
        if state != SequenceState.FINISHED and self.sequences.ids[row] == sequence_id:
            self.sequences.change(row, state)
