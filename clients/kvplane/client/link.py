"""A session's stream that mends itself, and the heartbeat beside it, for engines without an event loop."""

import threading
import time
from collections import deque
from contextlib import suppress

from kvplane.client.opening import RETRY_SECONDS
from kvplane.client.state import SessionState
from kvplane.client.values import StepResult
from kvplane.v1 import cache_pb2
from kvplane.wire.errors import CancelledError, KvplaneError, UnavailableError
from kvplane.wire.interface import CacheControl, StepStream

BROKEN = (UnavailableError, CancelledError)
"""Errors after which a stream is opened again."""

MAX_PAUSE_SECONDS = 1.0


class StepLink:
    """Sends steps and receives their answers; opens the stream again and repeats what has no answer (I7)."""

    def __init__(self, control: CacheControl, state: SessionState, timeout: float) -> None:
        self._control = control
        self._state = state
        self._early: deque[cache_pb2.StepResponse] = deque()
        """Results that came while we looked for notices."""
        self._stream = self._open(timeout)

    def send(self, request: cache_pb2.StepRequest) -> None:
        """Send a step. A broken stream is no error here: `receive` mends it and sends the step again."""
        with suppress(KvplaneError):
            self._stream.send(request)

    def receive(self, deadline: float) -> StepResult:
        """The result of the oldest step. `deadline` is a time of `time.monotonic`."""
        while True:
            try:
                message = self._early.popleft() if self._early else self._stream.receive(_until(deadline))
            except BROKEN as error:
                self._mend(error, deadline)
                continue
            result = self._state.receive(message)
            if result is not None:
                self._hear()
                return result

    def close(self) -> None:
        """Cut the stream."""
        self._stream.close()

    def _hear(self) -> None:
        """Take notices that wait behind the result: the sooner a revocation is known, the less is launched in vain."""
        with suppress(KvplaneError):  # a broken stream shows itself again at the next receive
            while True:
                message = self._stream.receive(0)
                if message.HasField("notice"):
                    self._state.receive(message)
                else:
                    self._early.append(message)

    def _mend(self, error: KvplaneError, deadline: float) -> None:
        pause = error.retry_after_seconds or RETRY_SECONDS
        while True:
            if time.monotonic() + pause > deadline:
                raise error
            time.sleep(pause)
            try:
                self._stream.close()
                self._stream = self._open(_until(deadline))
            except BROKEN as again:
                error, pause = again, again.retry_after_seconds or min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                return

    def _open(self, timeout: float) -> StepStream:
        stream = self._control.step(self._state.opening().open)
        try:
            opened = stream.receive(timeout)
            for request in self._state.stream_opened(opened.opened):
                stream.send(request)
        except BaseException:
            stream.close()
            raise
        self._early.clear()
        return stream


class Heartbeat:
    """Renews the lease while no step does, from a thread."""

    def __init__(self, control: CacheControl, state: SessionState) -> None:
        self._control = control
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvplane-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more renewals."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        lease = self._state.lease
        while not self._stop.wait(lease.ttl_seconds / 12):
            if not lease.heartbeat_due:
                continue
            sent_at = lease.clock()
            # What is wrong with the lease, the next step says; here it just is not renewed, and launches pause.
            with suppress(KvplaneError):
                self._control.heartbeat(
                    cache_pb2.HeartbeatRequest(session_id=self._state.session_id, lease_epoch=self._state.lease_epoch)
                )
                lease.renew(sent_at)


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
