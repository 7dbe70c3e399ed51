"""Commands of the host, with their output in one log."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class FailedError(Exception):
    """A step did not come out as it has to; the message says which and how."""


class CannotRunError(Exception):
    """This machine cannot run Docker; the message says why."""


class Shell:
    """Runs commands; whatever they print goes to the log."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self.environment = {**os.environ, **environment}
        self.timings: dict[str, float] = {}
        self._lock = threading.Lock()

    def run(
        self,
        *command: str | Path,
        timeout: float = 600,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run to the end; returns what was printed to stdout. Raises `FailedError` with the last lines."""
        words = [str(part) for part in command]
        start = time.monotonic()
        try:
            done = subprocess.run(
                words,
                cwd=cwd,
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise FailedError(f"{' '.join(words[:6])}: not done after {timeout:g} s") from error
        with self._lock, self.log.open("a") as file:
            file.write(f"$ {' '.join(words)}  [{time.monotonic() - start:.1f} s]\n{done.stdout}{done.stderr}\n")
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
            raise FailedError(f"{' '.join(words[:6])} ended with status {done.returncode}:\n{last}")
        return done.stdout

    def works(self, *command: str) -> bool:
        """Whether a command is there and ends well."""
        if shutil.which(command[0]) is None:
            return False
        try:
            self.run(*command, timeout=30)
        except FailedError:
            return False
        return True

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Say what is done, and how long it took."""
        print(f"-- {name}", flush=True)
        start = time.monotonic()
        yield
        self.timings[name] = time.monotonic() - start
        print(f"   {self.timings[name]:.1f} s", flush=True)


def wait_until(condition: object, what: str, seconds: float, every: float = 0.5) -> None:
    """Wait for a callable to answer true. Raises `FailedError`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise FailedError(f"{what}: not within {seconds:g} s")
        time.sleep(every)
