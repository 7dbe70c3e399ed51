"""A session's stream that mends itself, and the heartbeat beside it, on an event loop: `link` with `await`."""

import asyncio
import time
from collections import deque
from contextlib import suppress

from kvplane.client.aio_control import AioCacheControl, AioStepStream
from kvplane.client.draft import StepDraft
from kvplane.client.link import BROKEN, MAX_PAUSE_SECONDS, RESTARTED, away, log
from kvplane.client.opening import RETRY_SECONDS, heartbeat_request
from kvplane.client.state import SessionState
from kvplane.client.values import StepResult
from kvplane.v1 import cache_pb2
from kvplane.wire.errors import DeadlineExceededError, KvplaneError


class AioStepLink:
    """Sends steps and receives their answers; opens the stream again and repeats what has no answer (I7)."""

    def __init__(self, control: AioCacheControl, state: SessionState) -> None:
        self._control = control
        self._state = state
        self._early: deque[cache_pb2.StepResponse] = deque()
        self._stream: AioStepStream | None = None
        self._lock = asyncio.Lock()

    async def open(self, timeout: float, *, ahead: bool = False) -> None:
        """Open the stream (again). `ahead`: see `StepLink`."""
        await self.close()
        try:
            await self._bind(timeout, ahead=ahead)
        except RESTARTED:
            sent_at = self._state.lease.clock()
            self._state.resumed(await self._control.open_session(self._state.resume_request()), sent_at)
        else:
            return
        try:
            await self._bind(timeout, ahead=ahead)
        except RESTARTED as again:
            raise away(again) from again

    async def _bind(self, timeout: float, *, ahead: bool) -> None:
        stream = await self._control.step(self._state.opening().open)
        try:
            opened = (await stream.receive(timeout)).opened
            owed = opened.declaration_required
            if ahead:
                if owed:
                    await self._declare(stream, timeout, send=True)
                self._state.owes_declaration = False
                await stream.close()
                return
            if owed or self._state.awaits_declared:
                again = self._state.declared(await self._declare(stream, timeout, send=owed))
            else:
                again = self._state.stream_opened(opened)
            for request in again:
                await stream.send(request)
        except BaseException:
            await stream.close()
            raise
        self._early.clear()
        self._state.owes_declaration = False
        self._stream = stream

    async def _declare(self, stream: AioStepStream, timeout: float, *, send: bool) -> cache_pb2.DeclarationResult:
        for part in self._state.declaration() if send else ():
            await stream.send(part)
        while True:
            response = await stream.receive(timeout)
            if response.HasField("declared"):
                return response.declared
            self._state.receive(response)

    async def submit(self, draft: StepDraft, *, overlapped: bool = True) -> int:
        """Number and send a step; see `SessionState.encode`. A broken stream is no error here: `receive` mends it and
        sends the step again."""
        async with self._lock:
            request = self._state.encode(draft, overlapped=overlapped)
            if self._stream is not None:
                with suppress(KvplaneError):
                    await self._stream.send(request)
            return request.step.step_id

    async def receive(self, deadline: float) -> StepResult:
        """The result of the oldest step. `deadline` is a time of `time.monotonic`."""
        try:
            async with asyncio.timeout(_until(deadline)):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineExceededError("the session is being resumed") from None
        try:
            return await self._receive(deadline)
        finally:
            self._lock.release()

    async def resume(self, timeout: float) -> None:
        """Resume the session for an engine that waits for no answer now; see `StepLink.resume`."""
        if not self._lock.locked():
            async with self._lock:
                await self.open(timeout, ahead=not self._state.idle)

    async def _receive(self, deadline: float) -> StepResult:
        while True:
            try:
                if self._stream is None:
                    await self.open(_until(deadline))
                    continue
                message = self._early.popleft() if self._early else await self._stream.receive(_until(deadline))
            except (*BROKEN, *RESTARTED) as error:
                await self._mend(error, deadline)
                continue
            result = self._state.receive(message)
            if result is not None:
                self._hear(self._stream)
                return self._state.with_heard(result)

    async def close(self) -> None:
        """Cut the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()

    def _hear(self, stream: AioStepStream) -> None:
        while not self._early and (message := stream.receive_now()) is not None:
            if message.HasField("notice"):
                self._state.receive(message)
            else:
                self._early.append(message)

    async def _mend(self, error: KvplaneError, deadline: float) -> None:
        log.warning("session %d: the stream broke (%s); opening it again", self._state.session_id, error.message)
        pause = error.retry_after_seconds or RETRY_SECONDS
        while True:
            if time.monotonic() + pause > deadline:
                raise away(error)
            await asyncio.sleep(pause)
            try:
                await self.open(_until(deadline))
            except BROKEN as again:
                error, pause = again, again.retry_after_seconds or min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                log.warning("session %d: the stream is open again", self._state.session_id)
                return


class AioHeartbeat:
    """Renews the lease while no step does, from a task."""

    def __init__(self, control: AioCacheControl, state: SessionState, link: AioStepLink) -> None:
        self._control = control
        self._state = state
        self._link = link
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """No more renewals."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._state.lease.ttl_seconds / 12)
            try:
                await self._beat()
            except KvplaneError:
                pass
            except Exception:
                log.exception("session %d: the heartbeat failed", self._state.session_id)

    async def _beat(self) -> None:
        lease, state = self._state.lease, self._state
        if not lease.heartbeat_due and not state.owes_declaration:
            return
        sent_at = lease.clock()
        try:
            await self._control.heartbeat(heartbeat_request(state))
            lease.renew(sent_at)
        except RESTARTED:
            state.owes_declaration = True
        if state.owes_declaration:
            await self._link.resume(lease.ttl_seconds / 3)


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
