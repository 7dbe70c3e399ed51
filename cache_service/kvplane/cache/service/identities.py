"""Models, layouts and groups from the wire, and whether two of them agree."""

from collections.abc import Sequence

from google.protobuf.message import Message

from kvplane.cache.core import FullAttention, SlidingWindow
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import IdentityMismatchError, InvalidArgumentError, UnsupportedFeatureError
from kvplane.wire.features import refuse
from kvplane.wire.identity import DIGEST_BYTES, HASH_VERSION, ModelIdentity, Namespace
from kvplane.wire.limits import BLOCK_TOKENS_MAX, NAME_BYTES, SALT_BYTES


def model_identity(message: types_pb2.ModelIdentity, field: str) -> ModelIdentity:
    """Raises `InvalidArgumentError` for what no model can be, `IdentityMismatchError` for another hash version."""
    tokens = message.block_tokens
    if not 1 <= tokens <= BLOCK_TOKENS_MAX or tokens & (tokens - 1):
        raise InvalidArgumentError.of(
            f"{field}.block_tokens", f"{tokens} is no power of two from 1 to {BLOCK_TOKENS_MAX}"
        )
    if len(message.kv_scales_digest) not in (0, DIGEST_BYTES):
        raise InvalidArgumentError.of(
            f"{field}.kv_scales_digest", f"has {len(message.kv_scales_digest)} bytes, not 0 or 32"
        )
    for name in ("weights_revision", "tokenizer_revision", "kv_dtype"):
        check_name(getattr(message, name), f"{field}.{name}")
    if message.hash_version != HASH_VERSION:
        raise IdentityMismatchError(
            f"{field}.hash_version is {message.hash_version}, this server hashes by version {HASH_VERSION}",
            metadata={"hash_version": str(HASH_VERSION)},
        )
    return ModelIdentity(
        message.weights_revision,
        message.tokenizer_revision,
        message.kv_dtype,
        tokens,
        message.kv_scales_digest,
        message.hash_version,
    )


def group_spec(groups: Sequence[types_pb2.GroupSpec], field: str) -> FullAttention | SlidingWindow:
    """The one group of a pool. Raises `UnsupportedFeatureError` for several groups and for kinds that are not built."""
    if not groups:
        raise InvalidArgumentError.of(field, "a pool has at least one group")
    if len(groups) > 1:
        raise UnsupportedFeatureError(
            f"{field}: {len(groups)} groups in one pool are not built", metadata={"feature": "groups"}
        )
    group = groups[0]
    kind = group.WhichOneof("kind")
    if group.hash_lookahead_tokens or group.hash_unit_tokens not in (0, group.block_tokens):
        raise refuse("hash_units", f"{field}[0]")
    if kind == "full_attention":
        return FullAttention()
    if kind == "sliding_window":
        if group.sliding_window.sink_tokens:
            raise refuse("window_sinks", f"{field}[0].sliding_window.sink_tokens")
        if not group.sliding_window.window_tokens:
            raise InvalidArgumentError.of(f"{field}[0].sliding_window.window_tokens", "must be at least 1")
        return SlidingWindow(group.sliding_window.window_tokens)
    if kind is None:
        raise InvalidArgumentError.of(f"{field}[0].kind", "is not set")
    raise refuse(kind, f"{field}[0].{kind}")


def require_same(what: str, ours: Message, theirs: Message) -> None:
    """Raises `IdentityMismatchError` that names the first field which differs."""
    if ours == theirs:
        return
    for field in ours.DESCRIPTOR.fields:
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            raise IdentityMismatchError(
                f"{what}.{field.name} differs: the pool has {_text(mine)}, the caller {_text(other)}",
                metadata={"field": f"{what}.{field.name}", "pool": _text(mine), "caller": _text(other)},
            )


def namespace(message: cache_pb2.NamespaceSpec, tenant_salt: bytes, field: str) -> Namespace:
    """A namespace of a tenant. Raises `InvalidArgumentError`."""
    check_name(message.adapter_id, f"{field}.adapter_id")
    check_name(message.adapter_revision, f"{field}.adapter_revision")
    if len(message.sub_salt) > SALT_BYTES:
        raise InvalidArgumentError.of(
            f"{field}.sub_salt", f"has {len(message.sub_salt)} bytes, at most {SALT_BYTES} are allowed"
        )
    return Namespace(message.adapter_id, message.adapter_revision, tenant_salt, message.sub_salt)


def check_name(value: str, field: str) -> None:
    """Raises `InvalidArgumentError` for a name that is too long."""
    size = len(value.encode())
    if size > NAME_BYTES:
        raise InvalidArgumentError.of(field, f"has {size} bytes, at most {NAME_BYTES} are allowed")


def _text(value: object) -> str:
    return " ".join(str(value).split())[:80] or "nothing"
