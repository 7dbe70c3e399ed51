"""Where services listen and clients look when nobody says otherwise: the same default on every side."""

import os
from pathlib import Path

ADDRESS_VARIABLE = "KVPLANE_ADDRESS"
"""Environment variable with the address of the cache service."""


def runtime_directory() -> Path:
    """Folder for sockets: `$XDG_RUNTIME_DIR/kvplane`, or one of the user's own under the temporary folder."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvplane" if base else Path(os.environ.get("TMPDIR", "/tmp")) / f"kvplane-{os.getuid()}"


def cache_address() -> str:
    """gRPC address of the cache service: `$KVPLANE_ADDRESS`, or a Unix socket in the runtime directory."""
    return os.environ.get(ADDRESS_VARIABLE) or f"unix:{runtime_directory() / 'cache.sock'}"


def socket_path(address: str) -> Path | None:
    """Path of a Unix address; None for any other."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def split(value: object) -> object:
    """Addresses as a setting may give them, as a list: one, several with commas, or a list of such. Anything else comes
    back as it is, for the validation to refuse."""
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        return [address.strip() for part in parts for address in part.split(",")]
    return value


def is_loopback(address: str) -> bool:
    """Whether a TCP address can be reached from this host only."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
