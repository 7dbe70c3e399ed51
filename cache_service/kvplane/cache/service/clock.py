"""The clock of leases: it stands still while the process does."""

from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)

STILL_SECONDS = 1.0
"""Looked at less often than this, the clock stood still: the service looks four times a second."""


class RunningClock:
    """Seconds for which the process has been running. One that was stopped, or too busy, finds unread what it was sent
    meanwhile: neither a lease nor a shard is over for that. Whoever took its place has raised the incarnation."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self._still = 0.0

    def __call__(self) -> float:
        """Now."""
        now = self._monotonic()
        passed, self._last = now - self._last, now
        if passed > STILL_SECONDS:
            self._still += passed
            _log.warning("stood still", seconds=round(passed, 3))
        return now - self._still
