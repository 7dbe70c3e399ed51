"""A session's stream that mends itself, and the heartbeat beside it, for engines without an event loop."""

import logging
import threading
import time
from collections import deque
from contextlib import suppress

from kvplane.client.draft import StepDraft
from kvplane.client.opening import RETRY_SECONDS, heartbeat_request
from kvplane.client.state import SessionState
from kvplane.client.values import StepResult
from kvplane.v1 import cache_pb2
from kvplane.wire.errors import (
    CancelledError,
    DeadlineExceededError,
    KvplaneError,
    SessionExpiredError,
    StaleEpochError,
    UnavailableError,
)
from kvplane.wire.interface import CacheControl, StepStream

log = logging.getLogger("kvplane.client")

BROKEN = (UnavailableError, CancelledError)
"""Errors after which a stream is opened again."""

RESTARTED = (SessionExpiredError, StaleEpochError)
"""Errors after which a session is resumed by its token."""

MAX_PAUSE_SECONDS = 1.0


class StepLink:
    """Sends steps and receives their answers; opens the stream again and repeats what has no answer (I7)."""

    def __init__(self, control: CacheControl, state: SessionState, timeout: float) -> None:
        self._control = control
        self._state = state
        self._early: deque[cache_pb2.StepResponse] = deque()
        """A result that came while we looked for notices."""
        self._lock = threading.Lock()
        self._stream: StepStream | None = None
        self._open(timeout)

    def submit(self, draft: StepDraft, *, overlapped: bool = True) -> int:
        """Number and send a step; see `SessionState.encode`. A broken stream is no error here: `receive` mends it and
        sends the step again."""
        with self._lock:
            request = self._state.encode(draft, overlapped=overlapped)
            if self._stream is not None:
                with suppress(KvplaneError):
                    self._stream.send(request)
            return request.step.step_id

    def receive(self, deadline: float) -> StepResult:
        """The result of the oldest step. `deadline` is a time of `time.monotonic`."""
        if not self._lock.acquire(timeout=_until(deadline)):
            raise DeadlineExceededError("the session is being resumed")
        try:
            return self._receive(deadline)
        finally:
            self._lock.release()

    def resume(self, timeout: float) -> None:
        """Resume the session for an engine that waits for no answer now; one that does resumes by itself. What is left
        of its tables it learns with its next result: until then no plan is made (`SessionState.check_declared`)."""
        if self._lock.acquire(blocking=False):
            try:
                self._open(timeout, ahead=not self._state.idle)
            finally:
                self._lock.release()

    def _receive(self, deadline: float) -> StepResult:
        while True:
            try:
                if self._stream is None:
                    self._open(_until(deadline))
                    continue
                message = self._early.popleft() if self._early else self._stream.receive(_until(deadline))
            except (*BROKEN, *RESTARTED) as error:
                self._mend(error, deadline)
                continue
            result = self._state.receive(message)
            if result is not None:
                self._hear(self._stream)
                return self._state.with_heard(result)

    def close(self) -> None:
        """Cut the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _hear(self, stream: StepStream) -> None:
        """Take notices that wait behind the result: the sooner a revocation is known, the less is launched in vain.
        Those behind a further result wait for it: what it grants, they may take back."""
        with suppress(KvplaneError):  # a broken stream shows itself again at the next receive
            while not self._early:
                message = stream.receive(0)
                if message.HasField("notice"):
                    self._state.receive(message)
                else:
                    self._early.append(message)

    def _mend(self, error: KvplaneError, deadline: float) -> None:
        log.warning("session %d: the stream broke (%s); opening it again", self._state.session_id, error.message)
        pause = error.retry_after_seconds or RETRY_SECONDS
        while True:
            if time.monotonic() + pause > deadline:
                raise away(error)
            time.sleep(pause)
            try:
                self._open(_until(deadline))
            except BROKEN as again:
                error, pause = again, again.retry_after_seconds or min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                log.warning("session %d: the stream is open again", self._state.session_id)
                return

    def _open(self, timeout: float, *, ahead: bool = False) -> None:
        """Open the stream (again). With `ahead`, only as far as the service knows what the session holds: the answer
        comes again on the next stream, and so does what the closed one has left unread."""
        self.close()
        try:
            self._bind(timeout, ahead=ahead)
        except RESTARTED:
            # The lease is unknown, or not the newest: the service was restarted. Its token outlives that.
            sent_at = self._state.lease.clock()
            self._state.resumed(self._control.open_session(self._state.resume_request()), sent_at)
        else:
            return
        try:
            self._bind(timeout, ahead=ahead)
        except RESTARTED as again:  # and once more since
            raise away(again) from again

    def _bind(self, timeout: float, *, ahead: bool) -> None:
        stream = self._control.step(self._state.opening().open)
        try:
            opened = stream.receive(timeout).opened
            owed = opened.declaration_required
            if ahead:
                if owed:
                    self._declare(stream, timeout, send=True)
                self._state.owes_declaration = False
                stream.close()
                return
            if owed or self._state.awaits_declared:
                again = self._state.declared(self._declare(stream, timeout, send=owed))
            else:
                again = self._state.stream_opened(opened)
            for request in again:
                stream.send(request)
        except BaseException:
            stream.close()
            raise
        self._early.clear()
        self._state.owes_declaration = False
        self._stream = stream

    def _declare(self, stream: StepStream, timeout: float, *, send: bool) -> cache_pb2.DeclarationResult:
        for part in self._state.declaration() if send else ():
            stream.send(part)
        while True:
            response = stream.receive(timeout)
            if response.HasField("declared"):
                return response.declared
            self._state.receive(response)


class Heartbeat:
    """Renews the lease while no step does, from a thread."""

    def __init__(self, control: CacheControl, state: SessionState, link: StepLink) -> None:
        self._control = control
        self._state = state
        self._link = link
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvplane-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more renewals."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._state.lease.ttl_seconds / 12):
            try:
                self._beat()
            except KvplaneError:
                pass  # what is wrong with the lease, the next step says; here it is not renewed, and launches pause
            except Exception:
                log.exception("session %d: the heartbeat failed", self._state.session_id)

    def _beat(self) -> None:
        lease, state = self._state.lease, self._state
        if not lease.heartbeat_due and not state.owes_declaration:
            return
        sent_at = lease.clock()
        try:
            self._control.heartbeat(heartbeat_request(state))
            lease.renew(sent_at)
        except RESTARTED:
            state.owes_declaration = True
        if state.owes_declaration:
            self._link.resume(lease.ttl_seconds / 3)


def away(error: KvplaneError) -> UnavailableError:
    """Why a stream is not open: not yet, whatever the last try ended with."""
    if isinstance(error, UnavailableError):
        return error
    return UnavailableError(
        f"the stream is not open again: {error.message}",
        metadata=error.metadata,
        retry_after_seconds=error.retry_after_seconds or RETRY_SECONDS,
    )


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
