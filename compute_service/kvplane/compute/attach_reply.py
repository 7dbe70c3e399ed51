"""What an attaching process is given: descriptors, and where blocks lie behind them."""

import os
from dataclasses import dataclass

from kvplane.compute.arenas import Arena
from kvplane.compute.dtypes import wire_dtype
from kvplane.compute.processes import Process
from kvplane.compute.state import Holding, ShardState
from kvplane.v1 import attach_pb2, types_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The answer to a hello and the descriptors that go with it."""

    message: attach_pb2.AttachReply
    descriptors: list[int]
    to_close: list[int]
    """Those that were opened for this reply alone."""


def pool_reply(state: ShardState, holding: Holding, process: Process) -> Reply:
    """The whole pool: blocks and stamps and the process's hold map writable, the directory read-only."""
    pool = holding.pool
    assert pool.directory_memory.path is not None
    read_only = os.open(pool.directory_memory.path, os.O_RDONLY | os.O_CLOEXEC)
    pieces = (pool.blocks_memory, pool.directory_memory, pool.stamps_memory, process.hold_map)
    item, dtype = pool.layout.dtype.itemsize, wire_dtype(pool.layout.dtype)
    message = attach_pb2.AttachReply(
        handles=[
            attach_pb2.MemoryHandle(
                kind=attach_pb2.MEMORY_KIND_FILE_DESCRIPTOR, descriptor_index=index, num_bytes=piece.num_bytes
            )
            for index, piece in enumerate(pieces)
        ],
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
    )
    descriptors = [
        pool.blocks_memory.descriptor,
        read_only,
        pool.stamps_memory.descriptor,
        process.hold_map.descriptor,
    ]
    return Reply(message, descriptors, [read_only])


def arena_reply(state: ShardState, holding: Holding, arena: Arena) -> Reply:
    """An arena alone."""
    handle = attach_pb2.MemoryHandle(kind=attach_pb2.MEMORY_KIND_FILE_DESCRIPTOR, num_bytes=arena.shared.num_bytes)
    message = attach_pb2.AttachReply(
        handles=[handle],
        pool_epoch=holding.pool.pool_epoch,
        incarnation=state.incarnation,
        boot_id=state.identity.boot_id,
        arena_id=arena.arena_id,
    )
    return Reply(message, [arena.shared.descriptor], [])
