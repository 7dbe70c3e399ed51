"""The one place where errors meet `google.rpc.Status`, in both directions.

A status carries exactly one ErrorInfo (reason, domain, metadata), a BadRequest when fields are at fault, and a
RetryInfo when a retry makes sense.
"""

from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from kvplane.wire.errors import Code, FieldViolation, KvplaneError

DOMAIN = "kvplane"
"""`ErrorInfo.domain` of every error."""


def _tree(root: type[KvplaneError]) -> Iterator[type[KvplaneError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_DETAILS_KEY = "grpc-status-details-bin"

_CODES = {code.value: code for code in Code}
_BY_REASON = {kind.default_reason: kind for kind in _tree(KvplaneError)}
# The first class of a code in tree order is its most general one.
_BY_CODE = {kind.code: kind for kind in reversed(list(_tree(KvplaneError)))}


def to_status(error: KvplaneError) -> Status:
    """Encode an error."""
    status = Status(code=int(error.code), message=error.message)
    _add(status, ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.violations:
        _add(
            status,
            BadRequest(
                field_violations=[
                    BadRequest.FieldViolation(field=violation.field, description=violation.description)
                    for violation in error.violations
                ]
            ),
        )
    if error.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_seconds * 1e9))
        _add(status, RetryInfo(retry_delay=delay))
    return status


def from_status(status: Status) -> KvplaneError:
    """Decode a status whose code is not OK. Any server's status is understood: an unknown reason falls back to
    the general class of its code, and a detail that does not parse is left out. Raises `ValueError` when the code
    is OK, which is no error."""
    if status.code == 0:
        raise ValueError("status is OK")
    info = ErrorInfo()
    violations: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    for detail in status.details:
        bad_request, retry = BadRequest(), RetryInfo()
        try:
            if detail.Unpack(info):
                continue
            if detail.Unpack(bad_request):
                violations = tuple(
                    FieldViolation(each.field, each.description) for each in bad_request.field_violations
                )
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        except DecodeError:
            continue
    code = _CODES.get(status.code, Code.UNKNOWN)
    kind = _BY_REASON.get(info.reason) if info.domain == DOMAIN else None
    if kind is None or kind.code != code:
        kind = _BY_CODE.get(code, KvplaneError)
    error = kind(
        status.message,
        reason=info.reason or code.name,
        metadata=dict(info.metadata),
        retry_after_seconds=retry_after,
        violations=violations,
    )
    if error.code != code:
        error.metadata.setdefault("code", code.name)
    return error


def from_rpc_error(error: grpc.RpcError) -> KvplaneError:
    """Decode what a failed call raised, sync or aio, with or without rich details. The call's own code decides."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return KvplaneError(str(error))
    code = error.code()
    bare = Status(code=code.value[0] or int(Code.UNKNOWN), message=error.details() or code.name)
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                rich = Status.FromString(value)
            except DecodeError:
                break
            return from_status(rich if rich.code == bare.code else bare)
    return from_status(bare)


def abort_status(error: KvplaneError) -> grpc.Status:
    """What a servicer hands to `context.abort_with_status`."""
    return rpc_status.to_status(to_status(error))


def _add(status: Status, detail: ErrorInfo | BadRequest | RetryInfo) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)
