"""Namespaces, sessions and processes in a shard's directory: a dying writer leaves old or new, not half.

A new row is written whole before its flag says IN_USE; a row is taken out by clearing its flag first. What changes
later (a namespace's version, a session's lease, fence and last grant) changes in single aligned stores. A namespace's
stored root is a hint: readers compute it from model, identity and version, so a version raised by a writer that died
before it stored the new root cannot bring removed content back.
"""

import numpy as np

from kvplane.wire.directory import IN_USE, NAMESPACE_IDENTITY_BYTES, Rows
from kvplane.wire.errors import LimitExceededError
from kvplane.wire.limits import NAME_BYTES


def used(rows: Rows) -> list[int]:
    """Indexes of rows in use, ascending."""
    found: list[int] = np.flatnonzero(rows["flags"] & IN_USE).tolist()
    return found


def find(rows: Rows, **key: int) -> int | None:
    """Index of the row in use whose fields have these values; None when there is none."""
    mask = (rows["flags"] & IN_USE) != 0
    for name, value in key.items():
        mask &= rows[name] == value
    found = np.flatnonzero(mask)
    return int(found[0]) if len(found) else None


def add(rows: Rows, name: str, **values: object) -> int:
    """Write a new row and return its index. Raises `LimitExceededError` with the table's name when it is full."""
    free = np.flatnonzero((rows["flags"] & IN_USE) == 0)
    if not len(free):
        raise LimitExceededError(f"the directory's {name} are full", metadata={"limit": name, "value": str(len(rows))})
    index = int(free[0])
    rows[index] = np.zeros((), rows.dtype)
    for field, value in values.items():
        rows[field][index] = value
    rows["flags"][index] = IN_USE
    return index


def remove(rows: Rows, index: int) -> None:
    """Take a row out of use."""
    rows["flags"][index] = 0


def padded(value: bytes, size: int) -> np.void:
    """Bytes for a field of fixed size. Raises `ValueError` when they do not fit."""
    if len(value) > size:
        raise ValueError(f"{len(value)} bytes do not fit a field of {size}")
    return np.void(value.ljust(size, b"\0"))


def put_namespace(rows: Rows, namespace_id: int, version: int, root: bytes, tenant: str, identity: bytes) -> None:
    """Store a namespace, or raise the version of one that is there. A version never falls."""
    index = find(rows, namespace_id=namespace_id)
    if index is not None:
        if version > int(rows["version"][index]):
            rows["version"][index] = version
            rows["root"][index] = np.void(root)
        return
    name = tenant.encode()
    add(
        rows,
        "namespaces",
        namespace_id=namespace_id,
        version=version,
        root=np.void(root),
        tenant=padded(name, NAME_BYTES),
        tenant_length=len(name),
        identity=padded(identity, NAMESPACE_IDENTITY_BYTES),
        identity_length=len(identity),
    )


def text(rows: Rows, index: int, field: str) -> bytes:
    """Bytes of a field that has its length beside it (`tenant`, `identity`)."""
    value: bytes = rows[field][index].tobytes()
    return value[: int(rows[f"{field}_length"][index])]
