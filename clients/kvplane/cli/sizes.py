"""Sizes as people write and read them."""

import os
import re
from pathlib import Path

from kvplane.wire.errors import InvalidArgumentError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str, field: str) -> int:
    """Bytes of `16GiB`, `1.5g`, `20GB` or `1073741824`. Raises `InvalidArgumentError`."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise InvalidArgumentError.of(field, f"{text!r} is no size; 16GiB, 20GB and 1073741824 are")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def parse_budget(text: str, available_bytes: int, field: str) -> int:
    """Bytes of a size, or of a share of what is available, like `80%`. Raises `InvalidArgumentError`."""
    stripped = text.strip()
    if not stripped.endswith("%"):
        return parse_bytes(text, field)
    try:
        share = float(stripped[:-1])
    except ValueError:
        share = 0.0
    if not 0 < share <= 100:
        raise InvalidArgumentError.of(field, f"{text!r} is no share between 0% and 100%")
    return int(share / 100 * available_bytes)


def format_bytes(num_bytes: float) -> str:
    """At most four digits, with a binary unit: `3.125 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def available_bytes(folder: Path) -> int:
    """Bytes that the file system of a folder, which need not be there yet, has left."""
    stats = os.statvfs(existing(folder))
    return stats.f_bavail * stats.f_frsize


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder
