"""What an attaching process is given: descriptors, and where blocks lie behind them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from kvplane.compute.arenas import Arena
from kvplane.compute.device import DeviceBlocks, HostBlocks
from kvplane.compute.dtypes import wire_dtype
from kvplane.compute.memory import SharedMemory
from kvplane.compute.processes import Process
from kvplane.compute.state import Holding, ShardState
from kvplane.v1 import attach_pb2, types_pb2
from kvplane.wire.errors import PoolLostError


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The answer to a hello and the descriptors that go with it, which are the reply's own."""

    message: attach_pb2.AttachReply
    descriptors: list[int]

    def close(self) -> None:
        """Close the descriptors: they were sent, or will not be."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def pool_reply(state: ShardState, holding: Holding, process: Process) -> Reply:
    """The whole pool: blocks and stamps and the process's hold map writable, the directory read-only. Blocks on a CUDA
    device go by their IPC handle, everything else by descriptors.

    Made on the device thread: what runs there next may release the pool, and its descriptors' numbers are used again
    then. Raises `PoolLostError` when there are no descriptors to be had.
    """
    pool = holding.pool
    blocks = pool.blocks_memory
    pieces = [pool.directory_memory, pool.stamps_memory, process.hold_map]
    handles = []
    if isinstance(blocks, HostBlocks):
        pieces.insert(0, blocks.shared)
    else:
        assert isinstance(blocks, DeviceBlocks)
        handles.append(
            attach_pb2.MemoryHandle(
                kind=attach_pb2.MEMORY_KIND_CUDA_IPC, cuda_ipc_handle=blocks.handle, num_bytes=blocks.num_bytes
            )
        )
    handles += [
        attach_pb2.MemoryHandle(
            kind=attach_pb2.MEMORY_KIND_FILE_DESCRIPTOR, descriptor_index=index, num_bytes=piece.num_bytes
        )
        for index, piece in enumerate(pieces)
    ]
    item, dtype = pool.layout.dtype.itemsize, wire_dtype(pool.layout.dtype)
    message = attach_pb2.AttachReply(
        handles=handles,
        segments=[
            attach_pb2.AttachedSegment(
                segment=types_pb2.SegmentSpec(num_blocks=pool.num_blocks),
                layer=place.layer,
                role=place.role,
                handle_index=0,
                offset=place.offset,
                dtype=dtype,
                shape=place.shape,
                strides_bytes=[stride * item for stride in place.strides],
            )
            for place in pool.places()
        ],
        directory_handle=1,
        stamps_handle=2,
        hold_map_handle=3,
        pool_epoch=pool.pool_epoch,
        incarnation=state.incarnation,
        boot_id=state.identity.boot_id,
        cuda_ipc_event=state.identity.device.event_handle(),
    )
    return Reply(message, _opened(pieces, read_only=pool.directory_memory))


def arena_reply(state: ShardState, holding: Holding, arena: Arena) -> Reply:
    """An arena alone. Raises `PoolLostError` like `pool_reply`."""
    handle = attach_pb2.MemoryHandle(kind=attach_pb2.MEMORY_KIND_FILE_DESCRIPTOR, num_bytes=arena.shared.num_bytes)
    message = attach_pb2.AttachReply(
        handles=[handle],
        pool_epoch=holding.pool.pool_epoch,
        incarnation=state.incarnation,
        boot_id=state.identity.boot_id,
        arena_id=arena.arena_id,
    )
    return Reply(message, _opened([arena.shared]))


def _opened(pieces: Iterable[SharedMemory], read_only: SharedMemory | None = None) -> list[int]:
    """Descriptors of their own for pieces of memory. Raises `PoolLostError`, and leaves none open then."""
    made: list[int] = []
    try:
        for piece in pieces:
            if piece is read_only:
                assert piece.path is not None
                made.append(os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC))
            else:
                made.append(os.dup(piece.descriptor))
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise PoolLostError(f"the memory cannot be handed over: {error.strerror}") from error
    return made
