"""SIGINT, SIGTERM and SIGHUP as exceptions that clean-up code can rely on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context in which the first signal raises in the main thread (SIGINT `KeyboardInterrupt`, the others
    `SystemExit` with 128 and the number), and every later one is only counted: what cleans up after
    the first is never interrupted.

    In another thread than the main one it does nothing, since Python handles signals in the main thread alone.
    """

    def __init__(self) -> None:
        self.count = 0
        """Signals so far."""
        self._depth = 0
        self._pending: int | None = None
        self._raised = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        pending, self._pending = self._pending, None
        if pending is not None and error is None:
            self._raise(pending)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Put a signal off until the end of the block: for what must be done whole, like starting a process and noting
        that it was started."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._pending is not None and not self._raised:
                number, self._pending = self._pending, None
                self._raise(number)

    def close(self) -> None:
        """From here on signals are only counted; what comes is raised when the context ends."""
        self._depth += 1

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the interface of handlers
        self.count += 1
        if self._raised:
            return
        if self._depth:
            self._pending = number
            return
        self._raise(number)

    def _raise(self, number: int) -> None:
        self._raised = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
