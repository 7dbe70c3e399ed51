"""A shard's memory in this process: mappings, and tensors over them as the reply describes them."""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvplane.client.compute.attach_socket import Attachment
from kvplane.client.compute.dtypes import torch_dtype
from kvplane.client.compute.topology import Topology, at_shard
from kvplane.kernels import KernelError, Layout, PagedKv
from kvplane.kernels.cuda.memory import OpenedMemory
from kvplane.kernels.cuda.runtime import runtime_of
from kvplane.v1 import attach_pb2, types_pb2
from kvplane.wire import directory as wire_directory
from kvplane.wire import stamps as wire_stamps
from kvplane.wire.directory import Rows
from kvplane.wire.errors import (
    IdentityMismatchError,
    KvplaneError,
    PreconditionError,
    StaleEpochError,
    UnsupportedFeatureError,
)

HANDLE_NOT_OPENED = "HANDLE_NOT_OPENED"
"""Reason of an error: memory that a shard handed over does not open here."""


@dataclass(slots=True, eq=False)
class MappedShard:
    """Views into one shard's memory. `close` drops them; it must be the last user."""

    shard: types_pb2.Shard
    layers: dict[int, PagedKv]
    """By layer, counted over the whole model."""
    stamps: npt.NDArray[np.uint64]
    """Shape [blocks]; writable."""
    hold_map: npt.NDArray[np.uint8]
    """A bit per block, least significant first; this process's own."""
    header: Rows
    """Header of the block directory, shape [1]; read-only."""
    mappings: list[mmap.mmap]
    opened: list[OpenedMemory]
    """Device memory."""

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return next(iter(self.layers.values())).geometry.device

    @property
    def incarnation(self) -> int:
        """Highest start of the control plane that the shard follows, as its memory says now."""
        return int(self.header["incarnation"][0])

    def close(self) -> None:
        """Unmap. Memory that somebody still views goes with its last view."""
        self.layers.clear()
        self.stamps = self.stamps[:0].copy()
        self.hold_map = self.hold_map[:0].copy()
        self.header = self.header.copy()
        while self.mappings:
            with suppress(BufferError):
                self.mappings.pop().close()
        while self.opened:
            self.opened.pop().close()


def map_shard(
    attachment: Attachment, pool: types_pb2.Pool, topology: Topology, index: int, device_index: int = 0
) -> MappedShard:
    """Open every handle of a reply; device memory on CUDA device `device_index` as this process counts them.

    Raises, with the shard named: `PreconditionError` (reason `HANDLE_NOT_OPENED`), `UnsupportedFeatureError` for memory
    of an unknown kind, `StaleEpochError` when the shard or its pool is another than the session's,
    `IdentityMismatchError` when it does not hold what it should."""
    try:
        return _map(attachment, pool, topology, index, device_index)
    except KvplaneError as error:
        raise at_shard(error, attachment.shard) from error.__cause__
    finally:
        attachment.close_descriptors()


def map_handle(attachment: Attachment, index: int, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    """Map one handle of a reply that came as a descriptor. Raises `PreconditionError` and `UnsupportedFeatureError`."""
    handles = attachment.reply.handles
    if index >= len(handles):
        raise _not_opened(f"handle {index} of {len(handles)}", "there is none")
    handle = handles[index]
    if handle.kind != attach_pb2.MEMORY_KIND_FILE_DESCRIPTOR:
        raise UnsupportedFeatureError(f"memory handle {index} is of kind {handle.kind}")
    if handle.descriptor_index >= len(attachment.descriptors):
        raise _not_opened(f"handle {index}", f"{len(attachment.descriptors)} descriptors came")
    descriptor = attachment.descriptors[handle.descriptor_index]
    try:
        size = os.fstat(descriptor).st_size
        if size < handle.num_bytes:
            raise _not_opened(f"handle {index}", f"it has {size} bytes, not {handle.num_bytes}")
        return mmap.mmap(descriptor, handle.num_bytes, access=access)
    except (OSError, ValueError, OverflowError) as error:
        raise _not_opened(f"handle {index}", str(error)) from error


def _open_cuda_ipc(handle: attach_pb2.MemoryHandle, index: int, device_index: int, event: bytes) -> OpenedMemory:
    """Open device memory, and order this process's stream behind what the shard launched until now."""
    try:
        runtime = runtime_of(device_index)
        opened = OpenedMemory(runtime, handle.cuda_ipc_handle, handle.num_bytes)
        if event:
            behind = runtime.open_event(event)
            runtime.wait(behind)
            runtime.destroy_event(behind)
    except KernelError as error:
        raise _not_opened(f"handle {index} on CUDA device {device_index}", str(error)) from error
    return opened


def _map(
    attachment: Attachment, pool: types_pb2.Pool, topology: Topology, index: int, device_index: int
) -> MappedShard:
    reply, shard = attachment.reply, topology.shards[index]
    for name, given, ours in (
        ("boot_id", reply.boot_id, shard.boot_id),
        ("pool_epoch", reply.pool_epoch, pool.pool_epoch),
    ):
        if given != ours:
            raise StaleEpochError(f"{name} is {given}, the session's pool has {ours}", metadata={"epoch": name})
    places: list[mmap.mmap | OpenedMemory] = []
    opened: list[OpenedMemory] = []
    try:
        for number, handle in enumerate(reply.handles):
            if handle.kind == attach_pb2.MEMORY_KIND_CUDA_IPC:
                opened.append(_open_cuda_ipc(handle, number, device_index, reply.cuda_ipc_event))
                places.append(opened[-1])
            else:
                reads = number == reply.directory_handle
                places.append(map_handle(attachment, number, mmap.ACCESS_READ if reads else mmap.ACCESS_WRITE))
        return _views(reply, pool, topology, index, places)
    except BaseException:
        for memory in opened:
            memory.close()
        raise


def _views(
    reply: attach_pb2.AttachReply,
    pool: types_pb2.Pool,
    topology: Topology,
    index: int,
    places: list[mmap.mmap | OpenedMemory],
) -> MappedShard:
    mappings = [each for each in places if isinstance(each, mmap.mmap)]
    try:
        handles = (reply.directory_handle, reply.stamps_handle, reply.hold_map_handle)
        shared = [_buffer(places[each]) for each in handles]
        directory = wire_directory.open_directory(shared[0])
        stamps = wire_stamps.open_stamps(shared[1])
        hold_map = wire_stamps.open_hold_map(shared[2])
    except (ValueError, IndexError) as error:
        raise _not_opened("directory, stamps or hold map", str(error)) from error
    num_blocks = len(directory.blocks)
    if len(stamps) != num_blocks or 8 * len(hold_map) < num_blocks:
        raise IdentityMismatchError(f"{num_blocks} directory rows, {len(stamps)} stamps", metadata={"field": "blocks"})
    layers = _layers(reply, places, pool.layout.head_layout)
    _check(layers, topology, index, num_blocks)
    opened = [each for each in places if isinstance(each, OpenedMemory)]
    return MappedShard(topology.shards[index], layers, stamps, hold_map, directory.header, mappings, opened)


def _buffer(memory: mmap.mmap | OpenedMemory) -> memoryview:
    if isinstance(memory, OpenedMemory):
        raise ValueError("it is device memory")
    return memoryview(memory)


def _layers(
    reply: attach_pb2.AttachReply, memory: list[mmap.mmap | OpenedMemory], head_layout: types_pb2.HeadLayout.ValueType
) -> dict[int, PagedKv]:
    places: dict[int, dict[int, list[attach_pb2.AttachedSegment]]] = {}
    for segment in sorted(reply.segments, key=lambda each: each.segment.first_block):
        places.setdefault(segment.layer, {}).setdefault(segment.role, []).append(segment)
    order = Layout.HND if head_layout == types_pb2.HEAD_LAYOUT_HND else Layout.NHD
    made = {}
    for layer, roles in places.items():
        if set(roles) != {types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE}:
            raise UnsupportedFeatureError(f"layer {layer} stores tensors besides one of keys and one of values")
        keys, values = (
            [_tensor(segment, memory) for segment in roles[role]]
            for role in (types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE)
        )
        _check_contiguous(roles[types_pb2.TENSOR_ROLE_KEY], keys)
        try:
            made[layer] = PagedKv.of(keys, values, layout=order)
        except KernelError as error:
            raise IdentityMismatchError(f"layer {layer}: {error}", metadata={"field": error.field}) from error
    return made


def _tensor(segment: attach_pb2.AttachedSegment, memory: list[mmap.mmap | OpenedMemory]) -> Tensor:
    dtype = torch_dtype(segment.dtype)
    what = f"layer {segment.layer}, segment {segment.segment.segment}"
    if segment.handle_index >= len(memory) or len(segment.shape) != len(segment.strides_bytes):
        raise _not_opened(what, "the reply does not describe it")
    mapping = memory[segment.handle_index]
    if isinstance(mapping, OpenedMemory):
        try:
            return mapping.tensor(dtype, segment.shape, segment.strides_bytes, segment.offset)
        except KernelError as error:
            raise _not_opened(what, str(error)) from error
    strides = [stride // dtype.itemsize for stride in segment.strides_bytes]
    last = sum((size - 1) * stride for size, stride in zip(segment.shape, segment.strides_bytes, strict=True))
    misaligned = any(stride % dtype.itemsize for stride in (*segment.strides_bytes, segment.offset))
    if misaligned or not prod(segment.shape) or segment.offset + last + dtype.itemsize > len(mapping):
        raise _not_opened(what, f"it does not lie in the {len(mapping)} bytes of its memory")
    flat = torch.frombuffer(mapping, dtype=dtype, count=len(mapping) // dtype.itemsize)
    return flat.as_strided(list(segment.shape), strides, segment.offset // dtype.itemsize)


def _check_contiguous(segments: list[attach_pb2.AttachedSegment], tensors: list[Tensor]) -> None:
    next_block = 0
    for segment, tensor in zip(segments, tensors, strict=True):
        if segment.segment.first_block != next_block:
            raise IdentityMismatchError(
                f"layer {segment.layer}: a segment begins at block {segment.segment.first_block}, not {next_block}",
                metadata={"field": "segments"},
            )
        next_block += tensor.shape[0]


def _check(layers: dict[int, PagedKv], topology: Topology, index: int, num_blocks: int) -> None:
    heads = topology.shards[index].spec.num_kv_heads
    if sorted(layers) != topology.held_layers(index):
        raise IdentityMismatchError(
            f"it holds layers {sorted(layers)}, the pool says {topology.held_layers(index)}",
            metadata={"field": "layers"},
        )
    for layer, blocks in layers.items():
        found = blocks.geometry
        expected = (num_blocks, topology.block_tokens, heads, topology.head_dim, topology.dtype)
        given = (found.num_blocks, found.block_size, found.num_kv_heads, found.head_dim, found.dtype)
        if given != expected:
            raise IdentityMismatchError(
                f"layer {layer} has (blocks, block size, KV heads, head_dim, dtype) {given}, the pool says {expected}",
                metadata={"field": "segments"},
            )


def _not_opened(what: str, why: str) -> PreconditionError:
    return PreconditionError(f"{what} does not open: {why}", reason=HANDLE_NOT_OPENED)
