"""The Execute stream: requests in, jobs to the device thread in their order, answers out in the same order."""

import time
from collections.abc import AsyncIterator, Callable
from itertools import count

import structlog

from kvplane.compute.answers import Answers, Write
from kvplane.compute.executor import Executor
from kvplane.compute.metrics import Metrics
from kvplane.compute.runs import Runs, Stream
from kvplane.compute.state import ShardState
from kvplane.kernels import KernelError
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.wire import features
from kvplane.wire.errors import (
    InternalError,
    InvalidArgumentError,
    KvplaneError,
    PermissionDeniedError,
    SupersededError,
    UnavailableError,
)

_log = structlog.get_logger(__name__)

UNANSWERED_REQUESTS = 64
"""Requests of one stream that may be without an answer; beyond that nothing is read from it."""


class ExecuteStreams:
    """All Execute streams. A session has one: a newer one ends the older."""

    def __init__(
        self, state: ShardState, executor: Executor, runs: Runs, metrics: Metrics, away_seconds: Callable[[], float]
    ) -> None:
        self._state = state
        self._executor = executor
        self._runs = runs
        self._metrics = metrics
        self._away_seconds = away_seconds
        self._ids = count(1)
        self._newest: dict[int, Stream] = {}

    async def serve(
        self, requests: AsyncIterator[compute_pb2.ExecuteRequest], write: Write, lost_after_seconds: float
    ) -> None:
        """Answer a stream's requests. Raises what refuses the stream as a whole."""
        opening = await anext(requests, None)
        if opening is None:
            return
        stream = await self._executor.submit(lambda: self._open(opening))
        session_id, last_id = stream.session.session_id, opening.request_id
        self._newest[session_id] = stream
        answers = Answers(write, self._metrics, UNANSWERED_REQUESTS)
        try:
            opened = compute_pb2.ExecuteOpened(
                last_grant=stream.session.last_grant, boot_id=self._state.identity.boot_id
            )
            await write(compute_pb2.ExecuteResponse(request_id=last_id, opened=opened))
            async for request in requests:
                if self._newest.get(session_id) is not stream:
                    raise SupersededError("a newer stream of this session has taken over")
                last_id += 1
                if request.request_id != last_id:
                    raise InvalidArgumentError.of("request_id", f"{request.request_id} does not follow {last_id - 1}")
                self._post(stream, request, answers, lost_after_seconds)
                await answers.room()
            await answers.drained()
        finally:
            answers.close()
            if self._newest.get(session_id) is stream:
                del self._newest[session_id]
            # Behind everything this stream has queued.
            self._executor.post(lambda: self._runs.close_stream(stream), lambda *_: None, bounded=False)

    def _open(self, request: compute_pb2.ExecuteRequest) -> Stream:
        if request.WhichOneof("request") != "open":
            raise InvalidArgumentError.of("open", "must be the first message of a stream")
        opening = request.open
        features.require(opening.required_features)
        holding = self._state.admitting()
        session = holding.sessions.authenticate(opening.session_id, opening.lease_epoch, opening.session_secret)
        if session.mode != types_pb2.SESSION_MODE_REMOTE:
            raise PermissionDeniedError(f"session {session.session_id} is attached; it executes by itself")
        return Stream(next(self._ids), session, opening.lease_epoch, holding)

    def _post(
        self, stream: Stream, request: compute_pb2.ExecuteRequest, answers: Answers, lost_after_seconds: float
    ) -> None:
        done = answers.expect(request.request_id)
        try:
            job = self._job(stream, request, lost_after_seconds)
            # What ends a plan only frees something: it is never turned away.
            self._executor.post(job, done, bounded=not request.HasField("close"))
        except KvplaneError as error:
            refusal = error
            # Through the thread as well: answers keep the order of their requests.
            self._executor.post(lambda: _refuse(refusal), done, bounded=False)

    def _job(
        self, stream: Stream, request: compute_pb2.ExecuteRequest, lost_after_seconds: float
    ) -> Callable[[], compute_pb2.ExecuteResponse]:
        kind = request.WhichOneof("request")
        if kind == "run":
            return lambda: self._guarded(self._run, stream, request.run)
        if kind == "plan":
            if self._away_seconds() > lost_after_seconds:
                raise UnavailableError(
                    "the control plane has been away for longer than this shard waits", retry_after_seconds=1.0
                )
            limit = request.plan.deadline_ms
            deadline = time.monotonic() + limit / 1000 if limit else None
            return lambda: self._guarded(self._plan, stream, request.plan, deadline)
        if kind == "close":
            return lambda: self._guarded(self._close, stream, request.close)
        if kind == "apply_grants":
            return lambda: self._guarded(self._apply, stream, request.apply_grants)
        raise InvalidArgumentError.of("request", "is not set" if kind is None else f"{kind} comes first or never")

    def _guarded(self, call: Callable[..., compute_pb2.ExecuteResponse], *given: object) -> compute_pb2.ExecuteResponse:
        """An unforeseen error refuses one request and not the stream."""
        try:
            return call(*given)
        except KvplaneError:
            raise
        except KernelError as error:
            raise InvalidArgumentError.of(error.field, error.description) from error
        except Exception as error:
            _log.exception("run failed")
            raise InternalError(f"{type(error).__name__} in the executor; see the server's log") from error

    def _plan(self, stream: Stream, plan: compute_pb2.Plan, deadline: float | None) -> compute_pb2.ExecuteResponse:
        last_grant = self._runs.open_plan(stream, plan, deadline)
        ready = compute_pb2.PlanReady(plan_id=plan.plan_id, last_grant=last_grant)
        return compute_pb2.ExecuteResponse(plan=ready)

    def _run(self, stream: Stream, run: compute_pb2.Run) -> compute_pb2.ExecuteResponse:
        done = compute_pb2.RunDone(tensors=[result.encode() for result in self._runs.run(stream, run)])
        return compute_pb2.ExecuteResponse(run=done)

    def _close(self, stream: Stream, close: compute_pb2.ClosePlan) -> compute_pb2.ExecuteResponse:
        self._runs.close_plan(stream, close.plan_id)
        return compute_pb2.ExecuteResponse(closed=compute_pb2.PlanClosed(plan_id=close.plan_id))

    def _apply(self, stream: Stream, request: compute_pb2.ApplyGrants) -> compute_pb2.ExecuteResponse:
        applied = compute_pb2.GrantsApplied(last_grant=self._runs.apply_grants(stream, request))
        return compute_pb2.ExecuteResponse(grants_applied=applied)


def _refuse(error: KvplaneError) -> compute_pb2.ExecuteResponse:
    raise error
