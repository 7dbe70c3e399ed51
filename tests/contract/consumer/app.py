"""A consumer's project: what its type checker sees of the installed wheel. Checked by `make lint`, never run.

Each `type: ignore` below is an error that the checker must find; an unused one fails the check, which is how
this file shows that the types are there and not `Any`.
"""

from kvplane.v1.cache_pb2 import GetPoolRequest, StepRequest
from kvplane.v1.cache_pb2_grpc import CacheServiceStub
from kvplane.v1.step_pb2 import Advance, Step
from kvplane.wire.digests import extend_chain
from kvplane.wire.errors import KvplaneError, SessionExpiredError
from kvplane.wire.identity import Digest, ModelIdentity, Namespace, root_digest
from kvplane.wire.packed import pack_u32, unpack_u32


def step(tokens: list[int]) -> StepRequest:
    """Build a message."""
    return StepRequest(step=Step(step_id=1, advance=Advance(tokens=pack_u32(tokens))))


def name_of(stub: CacheServiceStub) -> str:
    """Call a service."""
    return stub.GetPool(GetPoolRequest(pool_id="default"), timeout=1.0).pool.pool_id


def chain(tokens: bytes) -> list[Digest]:
    """Compute digests."""
    root = root_digest(ModelIdentity("w", "t", "bfloat16", 16), Namespace(), 0)
    return extend_chain(root, tokens, 16)


def reason(error: KvplaneError) -> str:
    """Handle an error."""
    return error.reason if isinstance(error, SessionExpiredError) else error.message


wrong_field: int = unpack_u32("f", b"").shape  # type: ignore[assignment]
wrong_digest = extend_chain(b"not a digest", b"", 16)  # type: ignore[arg-type]
wrong_request = GetPoolRequest(pool_id=3)  # type: ignore[arg-type]
