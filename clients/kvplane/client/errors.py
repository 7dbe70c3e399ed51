"""Errors that arise in the client itself. All others come from the services: `kvplane.wire.errors`."""

from kvplane.wire.errors import PreconditionError, UnavailableError


class LaunchPausedError(UnavailableError):
    """The lease was not renewed for half its time to live, so nothing may be launched. The session goes on renewing;
    try again after `retry_after_seconds`."""

    default_reason = "LAUNCH_PAUSED"


class SessionClosedError(PreconditionError):
    """The session was closed in this process."""

    default_reason = "SESSION_CLOSED"


class ForkedProcessError(PreconditionError):
    """The session belongs to the parent of this process. Open another one here: connections do not survive a fork."""

    default_reason = "FORKED_PROCESS"
