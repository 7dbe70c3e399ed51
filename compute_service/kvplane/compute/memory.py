"""Shared memory: named files that outlive the process that wrote them, and sealed anonymous ones for arenas."""

import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from kvplane.wire.errors import LimitExceededError

# A client that could shrink an arena would kill the service with SIGBUS at its next access.
_ARENA_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """A piece of mapped memory and the descriptor that others map it by."""

    name: str
    descriptor: int
    mapping: mmap.mmap
    path: Path | None = None
    """None: anonymous."""

    @property
    def buffer(self) -> memoryview:
        """The writable bytes."""
        return memoryview(self.mapping)

    @property
    def num_bytes(self) -> int:
        """Size."""
        return len(self.mapping)

    def unlink(self) -> None:
        """Remove the name; those who have mapped the memory keep it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last view into it, which may be in running work."""
        os.close(self.descriptor)


def claim(folder: Path) -> int:
    """Make a folder this process's own, as long as the returned descriptor is open. Raises `RuntimeError` when it
    belongs to another user or another process works in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.parent.stat().st_uid not in (os.getuid(), 0):
        raise RuntimeError(f"memory_folder: {folder} or its parent belongs to another user")
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise RuntimeError(f"memory_folder: another process works in {folder}") from error
    return descriptor


def available_bytes(folder: Path) -> int:
    """Bytes that the folder's file system has left."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises `LimitExceededError` when the folder has less: asked before the first byte is allocated."""
    free = available_bytes(folder)
    if num_bytes > free:
        raise LimitExceededError(
            f"{num_bytes} bytes of shared memory are needed, {folder} has {free}",
            metadata={"limit": "shared_memory_bytes", "value": str(free)},
        )


def create(path: Path, num_bytes: int) -> SharedMemory:
    """Make a zeroed file of this size, all of it reserved. What had the name before loses it, not its memory.

    Raises `LimitExceededError` when there is no space.
    """
    check_space(path.parent, num_bytes)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Reserving tells now what a sparse file would tell by SIGBUS in the middle of a step.
        os.posix_fallocate(descriptor, 0, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise LimitExceededError(
            f"{path} of {num_bytes} bytes could not be allocated: {error.strerror}",
            metadata={"limit": "shared_memory_bytes", "value": str(num_bytes)},
        ) from error
    return SharedMemory(path.name, descriptor, mapping, path)


def reopen(path: Path) -> SharedMemory:
    """Map a file that is there. Raises `OSError`, and `ValueError` for an empty one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(descriptor, 0)
    except (OSError, ValueError):
        os.close(descriptor)
        raise
    return SharedMemory(path.name, descriptor, mapping, path)


def create_arena(name: str, num_bytes: int) -> SharedMemory:
    """Make zeroed anonymous memory that nobody can resize. Raises `LimitExceededError`."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ARENA_SEALS)
        mapping = mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise LimitExceededError(
            f"an arena of {num_bytes} bytes could not be allocated: {error.strerror}",
            metadata={"limit": "arena_bytes", "value": str(num_bytes)},
        ) from error
    return SharedMemory(name, descriptor, mapping)
