"""Device memory that several processes work on: the owner's allocation, and what others open of it.

    opened = OpenedMemory(runtime_of(0), handle, num_bytes)          # in a process that was handed a handle
    keys = opened.tensor(torch.bfloat16, shape, strides, offset)     # zero-copy
    ...                                                              # launch, wait for all of it
    opened.close()                                                   # before the owner frees

A tensor is a view: it must not be used after `close` or `free`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvplane.kernels.cuda.runtime import HANDLE_BYTES, Runtime
from kvplane.kernels.errors import DeviceError, ShapeError, StrideError

BASE_ALIGNMENT = 256
"""Bytes that every base is a multiple of; cudaMalloc gives no less."""


class DeviceMemory:
    """A base allocation of this process, and the handle that others open it by."""

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        """Allocate, zeroed. Raises DeviceError when there is not so much."""
        self.runtime = runtime
        self.num_bytes = num_bytes
        self._pointer = runtime.malloc(num_bytes)
        try:
            self.handle = runtime.export(self._pointer)
            self._bytes: Tensor | None = runtime.view(self._pointer, num_bytes)
            _check_base(self._bytes)
            self._bytes.zero_()
        except BaseException:
            runtime.free(self._pointer)
            raise

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All of it as one dimension of a dtype."""
        if self._bytes is None:
            raise DeviceError("memory", "was freed")
        return self._bytes.view(dtype)

    def free(self) -> None:
        """Give it back; the second time does nothing. Everybody who opened it has closed it, or is gone."""
        if self._bytes is not None:
            self._bytes = None
            self.runtime.free(self._pointer)


class OpenedMemory:
    """Another process's allocation, mapped here."""

    def __init__(self, runtime: Runtime, handle: bytes, num_bytes: int) -> None:
        """Open a handle. Raises DeviceError: there is no other way to the bytes to fall back to."""
        if len(handle) != HANDLE_BYTES:
            raise DeviceError("handle", f"{HANDLE_BYTES} bytes expected, got {len(handle)}")
        self.runtime = runtime
        self.num_bytes = num_bytes
        self._pointer = runtime.open(handle)
        self._bytes: Tensor | None = runtime.view(self._pointer, num_bytes)

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], strides_bytes: Sequence[int], offset_bytes: int = 0
    ) -> Tensor:
        """A view of a place in it. Raises ShapeError for a place beyond its end, StrideError for odd bytes."""
        if self._bytes is None:
            raise DeviceError("memory", "was closed")
        size = dtype.itemsize
        if offset_bytes % size or any(stride % size for stride in strides_bytes):
            raise StrideError("strides_bytes", f"multiples of {size} bytes expected, got {list(strides_bytes)}")
        last = sum((length - 1) * stride for length, stride in zip(shape, strides_bytes, strict=True))
        if min((offset_bytes, last, *strides_bytes)) < 0 or offset_bytes + last + size > self.num_bytes:
            raise ShapeError("shape", f"ends at byte {offset_bytes + last + size} of {self.num_bytes}")
        whole = self._bytes[: self.num_bytes // size * size].view(dtype)
        return whole.as_strided(tuple(shape), tuple(stride // size for stride in strides_bytes), offset_bytes // size)

    def close(self) -> None:
        """Unmap it; the second time does nothing. What was launched on it has completed."""
        if self._bytes is not None:
            self._bytes = None
            self.runtime.close(self._pointer)


def _check_base(memory: Tensor) -> None:
    if memory.data_ptr() % BASE_ALIGNMENT:
        raise StrideError("memory", f"its base {memory.data_ptr():#x} is no multiple of {BASE_ALIGNMENT}")
