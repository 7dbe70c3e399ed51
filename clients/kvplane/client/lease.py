"""How long a session may still act on what it was granted: nothing is launched later than ttl/2 after a renewal."""

import time
from collections.abc import Callable

from kvplane.wire.errors import LaunchPausedError


class Lease:
    """A time to live, renewed by messages. Times are of a clock that also runs while the machine sleeps."""

    def __init__(self, ttl_seconds: float, clock: Callable[[], float] | None = None) -> None:
        self.ttl_seconds = ttl_seconds
        self.clock = clock or _boottime
        self.renewed_at = self.clock()
        """When the last message was sent that was answered: the server's renewal is not earlier."""

    def renew(self, sent_at: float) -> None:
        """A message sent at `sent_at` was answered."""
        self.renewed_at = max(self.renewed_at, sent_at)

    @property
    def remaining_seconds(self) -> float:
        """Until launches pause; negative once they do."""
        return self.renewed_at + self.ttl_seconds / 2 - self.clock()

    @property
    def heartbeat_due(self) -> bool:
        """Whether a third of the time to live has passed without a renewal."""
        return self.clock() - self.renewed_at >= self.ttl_seconds / 3

    def check(self) -> None:
        """To be called before anything is launched. Raises `LaunchPausedError`."""
        remaining = self.remaining_seconds
        if remaining <= 0:
            raise LaunchPausedError(
                f"the lease was not renewed for {self.ttl_seconds / 2 - remaining:.1f} s of {self.ttl_seconds:g} s; "
                "the cache service does not answer",
                metadata={"ttl_seconds": f"{self.ttl_seconds:g}"},
                retry_after_seconds=self.ttl_seconds / 6,
            )


def _boottime() -> float:
    # CLOCK_MONOTONIC stands still while the machine sleeps, the server's lease does not
    return time.clock_gettime(time.CLOCK_BOOTTIME)
