"""The Execute stream: requests in, jobs to the device thread in their order, answers out in the same order."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import TypeVar

import structlog

from kvplane.compute.executor import Executor
from kvplane.compute.metrics import Metrics
from kvplane.compute.runs import RunOutcome, Runs, Stream
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
from kvplane.wire.status import to_status

_log = structlog.get_logger(__name__)

UNANSWERED_REQUESTS = 64
"""Requests of one stream that may be without an answer; beyond that nothing is read from it."""

Answer = TypeVar("Answer")
Write = Callable[[compute_pb2.ExecuteResponse], Awaitable[None]]
_Pending = tuple[int, "asyncio.Future[compute_pb2.ExecuteResponse]"]


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
        self._newest: dict[int, asyncio.Future[None]] = {}

    async def serve(
        self, requests: AsyncIterator[compute_pb2.ExecuteRequest], write: Write, lost_after_seconds: float
    ) -> None:
        """Answer a stream's requests. Raises what refuses the stream as a whole."""
        opening = await anext(requests, None)
        if opening is None:
            return
        stream = await self._executor.submit(lambda: self._open(opening))
        superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        session_id = stream.session.session_id
        if session_id in self._newest:
            self._newest[session_id].set_result(None)
        self._newest[session_id] = superseded
        pending: asyncio.Queue[_Pending | None] = asyncio.Queue(UNANSWERED_REQUESTS)
        reader = asyncio.create_task(self._read(requests, opening.request_id, stream, pending, lost_after_seconds))
        try:
            opened = compute_pb2.ExecuteOpened(
                last_grant=stream.session.last_grant, boot_id=self._state.identity.boot_id
            )
            await write(compute_pb2.ExecuteResponse(request_id=opening.request_id, opened=opened))
            await self._answer(pending, superseded, write)
            await reader
        finally:
            reader.cancel()
            if self._newest.get(session_id) is superseded:
                del self._newest[session_id]
            # Behind everything this stream has queued.
            self._executor.submit(lambda: self._runs.close_stream(stream), bounded=False)

    def _open(self, request: compute_pb2.ExecuteRequest) -> Stream:
        if request.WhichOneof("request") != "open":
            raise InvalidArgumentError.of("open", "must be the first message of a stream")
        opening = request.open
        features.require(opening.required_features)
        holding = self._state.held()
        session = holding.sessions.authenticate(opening.session_id, opening.lease_epoch, opening.session_secret)
        if session.mode != types_pb2.SESSION_MODE_REMOTE:
            raise PermissionDeniedError(f"session {session.session_id} is attached; it executes by itself")
        return Stream(next(self._ids), session, opening.lease_epoch, holding)

    async def _read(
        self,
        requests: AsyncIterator[compute_pb2.ExecuteRequest],
        last_id: int,
        stream: Stream,
        pending: "asyncio.Queue[_Pending | None]",
        lost_after_seconds: float,
    ) -> None:
        try:
            async for request in requests:
                if request.request_id != last_id + 1:
                    raise InvalidArgumentError.of("request_id", f"{request.request_id} does not follow {last_id}")
                last_id = request.request_id
                # Jobs go to the thread in the order of the stream; what waits here is room for answers.
                await pending.put((last_id, self._submit(stream, request, lost_after_seconds)))
        finally:
            await pending.put(None)

    async def _answer(
        self, pending: "asyncio.Queue[_Pending | None]", superseded: "asyncio.Future[None]", write: Write
    ) -> None:
        while (entry := await pending.get()) is not None:
            request_id, future = entry
            try:
                response = await future
            except KvplaneError as error:
                self._metrics.refusals.labels(error.reason).inc()
                response = compute_pb2.ExecuteResponse(refused=to_status(error))
            response.request_id = request_id
            await write(response)
            if superseded.done():
                raise SupersededError("a newer stream of this session has taken over")

    def _submit(
        self, stream: Stream, request: compute_pb2.ExecuteRequest, lost_after_seconds: float
    ) -> "asyncio.Future[compute_pb2.ExecuteResponse]":
        kind = request.WhichOneof("request")
        try:
            if kind == "run":
                return self._executor.submit(lambda: self._guarded(lambda: self._run(stream, request.run)))
            if kind == "plan":
                if self._away_seconds() > lost_after_seconds:
                    raise UnavailableError(
                        "the control plane has been away for longer than this shard waits", retry_after_seconds=1.0
                    )
                plan, limit = request.plan, request.plan.deadline_ms
                deadline = time.monotonic() + limit / 1000 if limit else None
                return self._executor.submit(lambda: self._guarded(lambda: self._plan(stream, plan, deadline)))
            if kind == "close":
                return self._executor.submit(
                    lambda: self._guarded(lambda: self._close(stream, request.close)), bounded=False
                )
            if kind == "apply_grants":
                return self._executor.submit(lambda: self._guarded(lambda: self._apply(stream, request.apply_grants)))
            raise InvalidArgumentError.of("request", "is not set" if kind is None else f"{kind} comes first or never")
        except KvplaneError as error:
            refused: asyncio.Future[compute_pb2.ExecuteResponse] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused

    def _guarded(self, call: Callable[[], Answer]) -> Answer:
        """An unforeseen error refuses one request and not the stream."""
        try:
            return call()
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
        outcome: RunOutcome = self._runs.run(stream, run)
        totals = self._metrics.totals
        totals.runs += 1
        totals.written_bytes += outcome.written_bytes
        totals.read_bytes += outcome.read_bytes
        totals.attended_tokens += outcome.tokens
        done = compute_pb2.RunDone(tensors=[result.encode() for result in outcome.results])
        return compute_pb2.ExecuteResponse(run=done)

    def _close(self, stream: Stream, close: compute_pb2.ClosePlan) -> compute_pb2.ExecuteResponse:
        self._runs.close_plan(stream, close.plan_id)
        return compute_pb2.ExecuteResponse(closed=compute_pb2.PlanClosed(plan_id=close.plan_id))

    def _apply(self, stream: Stream, request: compute_pb2.ApplyGrants) -> compute_pb2.ExecuteResponse:
        applied = compute_pb2.GrantsApplied(last_grant=self._runs.apply_grants(stream, request))
        return compute_pb2.ExecuteResponse(grants_applied=applied)
