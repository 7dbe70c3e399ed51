"""Keys that outlive the process: what an earlier start has promised, a later one still recognises.

Everything is derived from one secret: the shards' grant keys, the secrets that engines show to compute services, and
the seal of resume tokens. Nobody but the service reads a token; it says what a session has to be opened with again.
"""

import hmac
import os
import secrets
import stat
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvplane.wire import tlv
from kvplane.wire.errors import SessionExpiredError

KEY_BYTES = 32
_SEAL_BYTES = 32
_TOKEN = b"kvplane resume token 1\0"
_SECRET = b"kvplane session secret 1\0"
_GRANT = b"kvplane grant key 1\0"


@dataclass(frozen=True, slots=True)
class Lease:
    """What a resume token carries. Tags of its encoding are the fields' places, counted from 1."""

    pool_id: str
    pool_epoch: int
    session_id: int
    mode: int
    ttl_ms: int
    num_ranks: int
    max_sequences: int
    namespace_id: int
    """The core's id of the namespace of sequences that name none."""
    tenant_id: str
    engine_name: str


class Keys:
    """What is derived from a service's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def load(cls, path: Path) -> "Keys":
        """Keys of the secret in a file, which is made on the first start, for this user alone. Raises `RuntimeError`
        for a file that others may read or that holds no secret, `OSError` for one that cannot be read or made."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            _make(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise RuntimeError(f"key_file: {path} must be a file of this user's that nobody else may read (0600)")
            secret = file.read()
        if len(secret) < KEY_BYTES:
            raise RuntimeError(f"key_file: {path} holds {len(secret)} bytes, a secret has at least {KEY_BYTES}")
        return cls(secret)

    def grant_key(self, pool_id: str) -> bytes:
        """Key of a pool's grants, 32 bytes."""
        return self._derive(_GRANT, pool_id.encode())

    def session_secret(self, session_id: int) -> bytes:
        """What a session's engine shows to compute services, 32 bytes."""
        return self._derive(_SECRET, session_id.to_bytes(8, "little"))

    def token(self, lease: Lease) -> bytes:
        """The resume token of a session; the same one for as long as it lives."""
        body = b""
        for tag, each in enumerate(fields(lease), 1):
            value = getattr(lease, each.name)
            body += tlv.text(tag, value) if isinstance(value, str) else tlv.u64(tag, value)
        return self._derive(_TOKEN, body) + body

    def lease(self, token: bytes) -> Lease:
        """What a token carries. Raises `SessionExpiredError` for one that this service has not made."""
        seal, body = token[:_SEAL_BYTES], token[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._derive(_TOKEN, body)):
            raise SessionExpiredError("the resume token is not of this service")
        values = dict(tlv.fields(body))
        found: dict[str, Any] = {}
        for tag, each in enumerate(fields(Lease), 1):
            found[each.name] = values[tag].decode() if each.type is str else int.from_bytes(values[tag], "little")
        return Lease(**found)

    def _derive(self, purpose: bytes, value: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + value, sha256)


def _make(path: Path) -> None:
    """Make a key file that appears whole or not at all; another process may be making the same one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
