"""The device thread: everything that touches rows, stamps or bytes runs here, one job after the other.

One order for all sessions and all commands is what makes "drained" mean something: when a fence's job runs, whatever
was queued before it has completed. It also means that no job needs a lock.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from kvplane.wire.errors import DeadlineExceededError, LimitExceededError

Result = TypeVar("Result")
Done = Callable[[Any, BaseException | None], None]
"""Takes a job's result, or its error."""
_Job = tuple[Done, Callable[[], Any], float | None]

RETRY_SECONDS = 0.02
"""When asking again makes sense after the queue was full."""


class Executor:
    """A thread and its queue. `post` and `submit` are called on the event loop; jobs run in that order."""

    def __init__(self, capacity: int, run: Callable[[Callable[[], Any]], Any]) -> None:
        """`run` runs a job and waits for what it launched."""
        self._capacity = capacity
        self._run = run
        self._depth = 0
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="kvplane-device", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Jobs that are queued or running."""
        return self._depth

    def post(
        self, job: Callable[[], object], done: Done, *, bounded: bool = True, deadline: float | None = None
    ) -> None:
        """Queue a job; `done` is called on the event loop when it has ended. `deadline` in seconds of
        `time.monotonic`: a job whose time has passed is not begun (`DeadlineExceededError`). Raises
        `LimitExceededError` when `bounded` and the queue is full; commands are never turned away."""
        if bounded and self._depth >= self._capacity:
            raise LimitExceededError(
                f"the executor's queue holds {self._depth} jobs",
                metadata={"limit": "queue", "value": str(self._capacity)},
                retry_after_seconds=RETRY_SECONDS,
            )
        self._depth += 1
        self._queue.put((done, job, deadline))

    def submit(
        self, job: Callable[[], Result], *, bounded: bool = True, deadline: float | None = None
    ) -> "asyncio.Future[Result]":
        """The same with a future for the result or the error."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.post(job, done, bounded=bounded, deadline=deadline)
        return future

    async def close(self) -> None:
        """Run what is queued, then end the thread."""
        self._queue.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.005)

    def _work(self) -> None:
        finish = self._loop.call_soon_threadsafe
        while (entry := self._queue.get()) is not None:
            done, job, deadline = entry
            result: Any = None
            error: BaseException | None = None
            try:
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceededError("the deadline passed before the work was launched")
                result = self._run(job)
            except Exception as raised:  # every error belongs to whoever posted the job
                error = raised
            finish(self._finish, done, result, error)
            # A job holds tensors and plans: not until the next one comes.
            del entry, done, job, result, error

    def _finish(self, done: Done, result: object, error: BaseException | None) -> None:
        self._depth -= 1
        done(result, error)
