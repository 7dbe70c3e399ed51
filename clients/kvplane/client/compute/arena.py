"""Memory that a remote session on the shard's host shares with it: tensors travel by it instead of in messages."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvplane.client.compute.attach_socket import Attachment
from kvplane.client.compute.memory import map_handle
from kvplane.client.compute.topology import at_shard
from kvplane.v1 import types_pb2
from kvplane.wire.errors import KvplaneError

SLICE_ALIGNMENT = 64
"""Bytes that every tensor's offset is a multiple of, as the contract asks."""

FIRST_ARENA_BYTES = 1 << 20


def slice_bytes(num_bytes: int) -> int:
    """Bytes that a tensor takes in an arena."""
    return -(-num_bytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT


class Arena:
    """One mapped arena of two halves, used in turn: what a shard that answered too late still writes never lands among
    the tensors of the next run."""

    def __init__(self, attachment: Attachment, shard: types_pb2.Shard) -> None:
        self._attachment = attachment
        self.arena_id = int(attachment.reply.arena_id)
        try:
            self._mapping: mmap.mmap = map_handle(attachment, 0)
        except KvplaneError as error:
            attachment.close()
            raise at_shard(error, shard) from error.__cause__
        attachment.close_descriptors()
        self.half_bytes = len(self._mapping) // 2 // SLICE_ALIGNMENT * SLICE_ALIGNMENT
        self._half = 0

    def place(self, sizes: Sequence[int]) -> list[int]:
        """Offsets of tensors of so many bytes, all in the half whose turn it is; they fit (`half_bytes`)."""
        self._half = 1 - self._half
        offset = self._half * self.half_bytes
        offsets = []
        for size in sizes:
            offsets.append(offset)
            offset += slice_bytes(size)
        return offsets

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view of a place; keep it no longer than the arena."""
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def close(self) -> None:
        """Give it up; the shard closes its side when the connection ends. Memory that is still viewed goes with its
        last view."""
        self._attachment.close()
        with suppress(BufferError):
            self._mapping.close()
