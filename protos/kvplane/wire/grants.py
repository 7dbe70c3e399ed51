"""Grants: block tables that a remote engine carries to the compute services and cannot forge.

The control plane signs the serialized body with a key that only it and the shards of the pool have; what is
signed is exactly the bytes that travel, so nothing depends on protobuf being canonical.
"""

import hmac
from hashlib import sha256

from kvplane.v1.step_pb2 import Grant, GrantBody
from kvplane.wire.errors import NotGrantedError

KEY_BYTES = 32
MAC_BYTES = 32
_CONTEXT = b"kvplane.v1.Grant\0"


def mac(key: bytes, body: bytes) -> bytes:
    """HMAC-SHA-256 of a serialized body, 32 bytes. Raises `ValueError` for a key of another length than 32."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"grant key has {len(key)} bytes, not {KEY_BYTES}")
    return hmac.digest(key, _CONTEXT + body, sha256)


def sign(key: bytes, body: GrantBody) -> Grant:
    """Make a grant of a body."""
    serialized = body.SerializeToString()
    return Grant(body=serialized, mac=mac(key, serialized))


def verify(key: bytes, grant: Grant) -> GrantBody:
    """Return the body of a grant. Raises `NotGrantedError` when it was not signed with `key`, and does not
    parse a single byte of it before that is known."""
    if not hmac.compare_digest(mac(key, grant.body), grant.mac):
        raise NotGrantedError("grant is not signed by this pool's control plane")
    return GrantBody.FromString(grant.body)
