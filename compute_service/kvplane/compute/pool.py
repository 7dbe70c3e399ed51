"""A shard's pool: block tensors, directory and stamps in named shared memory, so that a restart finds them again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvplane.compute import memory
from kvplane.compute.device import BlocksMemory, Device, HostBlocks
from kvplane.compute.layout import PoolLayout, TensorPlace
from kvplane.compute.memory import SharedMemory
from kvplane.kernels import Layout, PagedKv
from kvplane.v1 import types_pb2
from kvplane.wire import directory as wire_directory
from kvplane.wire import stamps as wire_stamps
from kvplane.wire.directory import Directory, DirectorySpec
from kvplane.wire.packed import U64Array

DIRECTORY = "directory"
STAMPS = "stamps"
BLOCKS = "blocks"


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One epoch's memory and the views into it. Only the device thread writes through them."""

    layout: PoolLayout
    num_blocks: int
    blocks_memory: BlocksMemory
    directory_memory: SharedMemory
    stamps_memory: SharedMemory
    directory: Directory
    stamps: U64Array
    """Shape [num_blocks]; attached processes write it as well."""
    layers: Mapping[int, PagedKv]
    """By layer, counted over the whole model."""

    @property
    def pool_epoch(self) -> int:
        """Epoch, from the directory's header."""
        return int(self.directory.header["pool_epoch"][0])

    @property
    def incarnation(self) -> int:
        """Highest start of the control plane that the memory knows."""
        return int(self.directory.header["incarnation"][0])

    @property
    def pool_bytes(self) -> int:
        """Bytes of block tensors."""
        return self.blocks_memory.num_bytes

    def places(self) -> list[TensorPlace]:
        """Where each tensor lies."""
        return list(self.layout.places(self.num_blocks))

    def start_epoch(self, pool_epoch: int, *, keep_sealed: bool) -> None:
        """Go on under a new epoch with the sealed rows, or with none. Unsealed content is lost in any case."""
        rows = self.directory.blocks
        keep = wire_directory.sealed_mask(rows, self.stamps) if keep_sealed else np.zeros(self.num_blocks, np.bool_)
        lost = np.flatnonzero(~keep)
        wire_directory.void(rows, lost)
        rows["filled"][lost] = 0
        self.directory.header["pool_epoch"] = pool_epoch
        wire_stamps.set_epoch(self.stamps_memory.buffer, pool_epoch)

    def release(self, users: Sequence[int] = (), *, unlink: bool) -> None:
        """Give the memory up. With `unlink` nobody finds it again; processes that mapped it keep their mapping. `users`
        are the pidfds of those, which stay the caller's."""
        if unlink:
            self.directory.header["valid"] = 0
        for piece in (self.directory_memory, self.stamps_memory):
            if unlink:
                piece.unlink()
            piece.close()
        self.blocks_memory.release(users, unlink=unlink)


def create_pool(folder: Path, layout: PoolLayout, spec: DirectorySpec, device: Device) -> Pool:
    """Allocate and format a pool. The whole need is checked first; what cannot fit leaves nothing behind.

    Raises `LimitExceededError`.
    """
    block_bytes = layout.num_bytes(spec.num_blocks)
    stamp_bytes = wire_stamps.stamps_bytes(spec.num_blocks)
    remove(folder)
    memory.check_space(folder, spec.num_bytes + stamp_bytes + (block_bytes if device.is_host else 0))
    blocks = device.allocate(folder / _blocks_name(layout), block_bytes)
    made: list[SharedMemory] = []
    try:
        for name, size in ((STAMPS, stamp_bytes), (DIRECTORY, spec.num_bytes)):
            made.append(memory.create(folder / name, size))
    except Exception:
        blocks.release((), unlink=True)
        for piece in made:
            piece.unlink()
            piece.close()
        raise
    stamps, directory = made
    stamp_array = wire_stamps.format_stamps(stamps.buffer, spec.num_blocks, spec.pool_epoch)
    # The directory's valid word comes last: it vouches for the other two files.
    formatted = wire_directory.format_directory(directory.buffer, spec)
    return _pool(layout, blocks, directory, stamps, formatted, stamp_array)


def reuse_pool(pool: Pool, spec: DirectorySpec) -> Pool:
    """A new, empty pool in the memory of an old one of the same size, which nobody else may have mapped: there is
    seldom room for both. Bytes stay where they are; no row lets anybody read them."""
    assert spec.num_blocks == pool.num_blocks
    pool.directory.header["valid"] = 0
    for piece in (pool.directory_memory, pool.stamps_memory):
        np.frombuffer(piece.buffer, np.uint8)[:] = 0
    stamps = wire_stamps.format_stamps(pool.stamps_memory.buffer, spec.num_blocks, spec.pool_epoch)
    directory = wire_directory.format_directory(pool.directory_memory.buffer, spec)
    return _pool(pool.layout, pool.blocks_memory, pool.directory_memory, pool.stamps_memory, directory, stamps)


def reopen_pool(folder: Path, layout: PoolLayout, boot_id: int) -> Pool | None:
    """Take up what an earlier process left: sealed rows stay, everything else is unsealed and unfilled.

    None when there is nothing that fits this layout; it is left for `create_pool` to remove. Whether the model is still
    the pool's is for the control plane to say, which gets the identity that the header has.
    """
    pieces: list[SharedMemory] = []
    try:
        for name in (DIRECTORY, STAMPS, _blocks_name(layout)):
            pieces.append(memory.reopen(folder / name))  # noqa: PERF401 - what was opened is closed on an error
        directory, stamps, blocks = pieces
        found = wire_directory.open_directory(directory.buffer)
        stamp_array = wire_stamps.open_stamps(stamps.buffer)
        num_blocks = len(found.blocks)
        fits = (
            len(stamp_array) == num_blocks
            and blocks.num_bytes == layout.num_bytes(num_blocks)
            and int(found.header["block_tokens"][0]) == layout.block_tokens
        )
        if not fits:
            raise ValueError("the memory is another pool's")
    except (OSError, ValueError):
        for piece in pieces:
            piece.close()
        return None
    found.header["boot_id"] = boot_id
    pool = _pool(layout, HostBlocks(blocks), directory, stamps, found, stamp_array)
    pool.start_epoch(pool.pool_epoch, keep_sealed=True)
    return pool


def invalidate(folder: Path) -> None:
    """What is left of a pool whose blocks went with the process that had them: attached processes see that it is over,
    and nobody takes it up."""
    try:
        left = memory.reopen(folder / DIRECTORY)
    except (OSError, ValueError):
        return
    try:
        wire_directory.open_directory(left.buffer).header["valid"] = 0
    except ValueError:
        pass
    finally:
        left.close()
    remove(folder)


def remove(folder: Path) -> None:
    """Take the names from whatever pool is in the folder."""
    for path in folder.iterdir():
        if path.name in (DIRECTORY, STAMPS) or path.name.startswith((f"{BLOCKS}-", "hold-")):
            path.unlink(missing_ok=True)


def _blocks_name(layout: PoolLayout) -> str:
    return f"{BLOCKS}-{layout.fingerprint}"


def _pool(
    layout: PoolLayout,
    blocks: BlocksMemory,
    directory_memory: SharedMemory,
    stamps_memory: SharedMemory,
    directory: Directory,
    stamps: U64Array,
) -> Pool:
    num_blocks = len(directory.blocks)
    flat = blocks.flat(layout.dtype)
    order = Layout.HND if layout.head_layout == types_pb2.HEAD_LAYOUT_HND else Layout.NHD
    views: dict[int, dict[int, torch.Tensor]] = {}
    for place in layout.places(num_blocks):
        first = place.offset // layout.dtype.itemsize
        views.setdefault(place.layer, {})[place.role] = flat.as_strided(place.shape, place.strides, first)
    layers = {
        layer: PagedKv.of(roles[types_pb2.TENSOR_ROLE_KEY], roles[types_pb2.TENSOR_ROLE_VALUE], layout=order)
        for layer, roles in views.items()
    }
    return Pool(layout, num_blocks, blocks, directory_memory, stamps_memory, directory, stamps, layers)
