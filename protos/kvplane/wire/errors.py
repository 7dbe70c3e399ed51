"""The one exception tree: what went wrong, told so that a program can act on it.

Pure Python, without grpc, so that the core of the cache can raise it; `kvplane.wire.status` is the one
place that maps it to and from `google.rpc.Status`. Each class stands for one row of the error table in
docs/errors.md: a canonical code and a reason.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Self


class Code(IntEnum):
    """Canonical status codes, numbered as in `google.rpc.Code`."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field: its path in the request and what is allowed there."""

    field: str
    description: str


class KvplaneError(Exception):
    """Base of all errors of kvplane.

    `reason` is a constant in UPPER_SNAKE_CASE, `metadata` holds the values of the message once more for
    programs, `retry_after_seconds` says when a retry makes sense (None: a retry changes nothing).
    """

    code: ClassVar[Code] = Code.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: dict[str, str] | None = None,
        retry_after_seconds: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = metadata or {}
        self.retry_after_seconds = retry_after_seconds
        self.violations = violations


class InvalidArgumentError(KvplaneError):
    """A field is malformed, or the request can never fit this pool. Fix the caller; a retry changes nothing."""

    code = Code.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"

    @classmethod
    def of(cls, field: str, description: str) -> Self:
        """The usual case: exactly one bad field."""
        return cls(f"{field}: {description}", violations=(FieldViolation(field, description),))


class NotFoundError(KvplaneError):
    """A named pool, namespace or operation does not exist (`metadata` names it)."""

    code = Code.NOT_FOUND
    default_reason = "NOT_FOUND"


class SessionExpiredError(NotFoundError):
    """The session or its lease is gone. Open a new one; published prefixes are still there."""

    default_reason = "SESSION_EXPIRED"


class AlreadyExistsError(KvplaneError):
    """The place is taken by another that is alive."""

    code = Code.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class PreconditionError(KvplaneError):
    """The request was right for a state that is over. Refresh what the reason names, then ask again."""

    code = Code.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class StaleGenerationError(PreconditionError):
    """A block was named with a generation that is not its current one."""

    default_reason = "STALE_GENERATION"


class StaleEpochError(PreconditionError):
    """A lease, stream, pool epoch or incarnation was named that a newer one has replaced."""

    default_reason = "STALE_EPOCH"


class StepOutOfOrderError(PreconditionError):
    """`step_id` is not the next one, and no stored response has it."""

    default_reason = "STEP_OUT_OF_ORDER"


class PriorStepRejectedError(PreconditionError):
    """The step was sent behind one that was rejected, so it was not applied either."""

    default_reason = "PRIOR_STEP_REJECTED"


class NotGrantedError(PreconditionError):
    """A block or sequence was named that this session was not granted."""

    default_reason = "NOT_GRANTED"


class IdentityMismatchError(PreconditionError):
    """Model, layout or hash identity differs from the pool's."""

    default_reason = "IDENTITY_MISMATCH"


class UnsupportedFeatureError(PreconditionError):
    """A required feature is unknown to this server, or not built."""

    default_reason = "UNSUPPORTED_FEATURE"


class SupersededError(PreconditionError):
    """A newer control plane or control stream has taken over."""

    default_reason = "SUPERSEDED"


class PoolLostError(PreconditionError):
    """The pool's bytes are gone; open a session on its next epoch."""

    default_reason = "POOL_LOST"


class SessionClosedError(PreconditionError):
    """The session was closed in this process."""

    default_reason = "SESSION_CLOSED"


class ForkedProcessError(PreconditionError):
    """The session belongs to the parent of this process: connections do not survive a fork."""

    default_reason = "FORKED_PROCESS"


class LimitExceededError(KvplaneError):
    """A hard limit is reached; `metadata` holds `limit` (its name) and `value`."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "LIMIT_EXCEEDED"


class PermissionDeniedError(KvplaneError):
    """The caller is known, but this is not its tenant's."""

    code = Code.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class UnauthenticatedError(KvplaneError):
    """The caller did not prove who it is."""

    code = Code.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class UnavailableError(KvplaneError):
    """Not now: reconciling, warming up, draining, or the control plane is away. Retry after the given time."""

    code = Code.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class LaunchPausedError(UnavailableError):
    """The lease was not renewed for half its time to live, so nothing may be launched. The SDK goes on renewing it."""

    default_reason = "LAUNCH_PAUSED"


class DeadlineExceededError(KvplaneError):
    """The deadline passed before the work began or before its answer came."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CancelledError(KvplaneError):
    """The caller went away."""

    code = Code.CANCELLED
    default_reason = "CANCELLED"


class NotBuiltError(KvplaneError):
    """The call is part of the contract and not built yet."""

    code = Code.UNIMPLEMENTED
    default_reason = "NOT_BUILT"


class DataLossError(KvplaneError):
    """Bytes failed their checksum, or a directory row is torn where it must not be."""

    code = Code.DATA_LOSS
    default_reason = "DATA_LOSS"


class InternalError(KvplaneError):
    """A bug of kvplane: an invariant does not hold."""

    code = Code.INTERNAL
    default_reason = "INTERNAL"
