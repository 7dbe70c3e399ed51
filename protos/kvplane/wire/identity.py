"""Who may share a cached block with whom: model identity, namespace, and the root of a hash chain.

Everything that changes the bytes of a KV block is in the root digest, so that a block computed under
other weights, another tokenizer, another KV numeric format, another adapter or another tenant's salt has
another digest and can never be hit by mistake. Layout (strides, tensor-parallel shape) changes where the
bytes lie, not what they mean: it is checked at registration and never hashed.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

from kvplane.wire import tlv

Digest = NewType("Digest", bytes)
"""Identity of a published block: 32 bytes of SHA-256. Always used together with its cache group."""

DIGEST_BYTES = 32
HASH_VERSION = 1
"""Rises when the encoding of identities or blocks changes; part of every model identity."""

_ROOT = 0x01
_NAMESPACE = 0x02
_NAMESPACE_VERSION = 0x03

_WEIGHTS_REVISION = 0x40
_TOKENIZER_REVISION = 0x41
_KV_DTYPE = 0x42
_KV_SCALES = 0x43
_BLOCK_TOKENS = 0x44
_HASH_VERSION = 0x45

_ADAPTER_ID = 0x50
_ADAPTER_REVISION = 0x51
_TENANT_SALT = 0x52
_SUB_SALT = 0x53


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What all blocks of one pool have in common."""

    weights_revision: str
    """Revision of the weights: a commit, a checkpoint hash, a training step."""
    tokenizer_revision: str
    """Revision of the tokenizer: the same text must give the same token ids."""
    kv_dtype: str
    """Numeric format of the stored KV: `bfloat16`, `float8_e4m3fn`, …"""
    block_tokens: int
    """Tokens per hashed block."""
    kv_scales_digest: bytes = b""
    """SHA-256 of the quantisation scales; empty when the format needs none."""
    hash_version: int = HASH_VERSION

    def encode(self) -> bytes:
        """Canonical bytes of this identity: all fields, in ascending tag order."""
        return b"".join(
            (
                tlv.text(_WEIGHTS_REVISION, self.weights_revision),
                tlv.text(_TOKENIZER_REVISION, self.tokenizer_revision),
                tlv.text(_KV_DTYPE, self.kv_dtype),
                tlv.field(_KV_SCALES, self.kv_scales_digest),
                tlv.u32(_BLOCK_TOKENS, self.block_tokens),
                tlv.u32(_HASH_VERSION, self.hash_version),
            )
        )


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the sequences that may share prefixes have in common beyond the model."""

    adapter_id: str = ""
    """Name of the adapter (LoRA); empty for the base model."""
    adapter_revision: str = ""
    tenant_salt: bytes = b""
    """Derived by the server from the authenticated tenant, never taken from a request."""
    sub_salt: bytes = b""
    """A client's own further separation inside its tenant."""

    def encode(self) -> bytes:
        """Canonical bytes of this namespace: all fields, in ascending tag order."""
        return b"".join(
            (
                tlv.text(_ADAPTER_ID, self.adapter_id),
                tlv.text(_ADAPTER_REVISION, self.adapter_revision),
                tlv.field(_TENANT_SALT, self.tenant_salt),
                tlv.field(_SUB_SALT, self.sub_salt),
            )
        )

    @classmethod
    def decode(cls, encoded: bytes) -> "Namespace":
        """The namespace of canonical bytes. Raises `ValueError` for any other bytes."""
        values = dict(tlv.fields(encoded))
        found = cls(
            values.get(_ADAPTER_ID, b"").decode(),
            values.get(_ADAPTER_REVISION, b"").decode(),
            values.get(_TENANT_SALT, b""),
            values.get(_SUB_SALT, b""),
        )
        if found.encode() != encoded:
            raise ValueError("these are not the canonical bytes of a namespace")
        return found


def root_digest(model: ModelIdentity, namespace: Namespace, namespace_version: int) -> Digest:
    """Digest that stands before the first block of every chain in a namespace.

    A weight update or a reset raises `namespace_version`, which gives every later block another digest;
    nothing published before can be hit again.
    """
    return Digest(
        sha256(
            tlv.field(_ROOT, model.encode())
            + tlv.field(_NAMESPACE, namespace.encode())
            + tlv.u64(_NAMESPACE_VERSION, namespace_version)
        ).digest()
    )
