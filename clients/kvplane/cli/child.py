"""A process that this one starts, whose output is collected, and that does not outlive it."""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

KEPT_LINES = 500
"""Lines of output that a child keeps."""

STOP_SECONDS = 10.0
"""How long a child may take to end after SIGTERM before it gets SIGKILL."""

OnLine = Callable[[str, str], None]
"""Called with a child's name and a line of its output, on a thread of the child's."""


class Child:
    """`python -m MODULE ARGUMENTS` in a process group of its own, so that a terminal's Ctrl-C reaches the parent
    alone, which then stops its children in order. Gets SIGKILL when the thread that made it ends: make it on the main
    one.

    With `pipes` standard input and output are text pipes for the caller (`stdin`, `stdout`), and only standard error is
    collected; without, both are collected.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        on_line: OnLine | None = None,
        pipes: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._on_line = on_line
        self._pipes = pipes
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self.process = subprocess.Popen(
            # -P: no module is taken from the folder that the command happens to be started in.
            [sys.executable, "-P", "-m", "kvplane.cli.tether", str(os.getpid()), module, *arguments],
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if pipes else subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        collected = self.process.stderr if pipes else self.process.stdout
        assert collected is not None
        self._reader = threading.Thread(target=self._read, args=(collected,), name=f"output of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def stdin(self) -> IO[str]:
        """Its standard input, when made with `pipes`."""
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[str]:
        """Its standard output, when made with `pipes`."""
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def lines(self) -> list[str]:
        """The newest lines of its output, at most `KEPT_LINES`."""
        return list(self._kept)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self.process.terminate()

    def kill(self) -> int:
        """SIGKILL, and wait until it is gone. Returns its exit status."""
        self.process.kill()
        return self._reap()

    def stop(self, seconds: float = STOP_SECONDS, hurry: Callable[[], bool] = lambda: False) -> int:
        """SIGTERM; SIGKILL after `seconds`, or as soon as `hurry` says so. Returns its exit status."""
        self.terminate()
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline or hurry():
                return self.kill()
            time.sleep(0.01)
        return self._reap()

    def close(self) -> None:
        """Close the caller's ends of the pipes. What is left in `stdout` can be read until then."""
        for pipe in (self.process.stdin, self.process.stdout) if self._pipes else ():
            # What was buffered for a process that is gone is lost.
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _reap(self) -> int:
        status = self.process.wait()
        # A grandchild may hold the other end of the pipe open: its lines are not waited for.
        self._reader.join(1.0)
        return status

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                text = line.rstrip("\n")
                self._kept.append(text)
                if self._on_line is not None:
                    self._on_line(self.name, text)
