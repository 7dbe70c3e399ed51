"""A CUDA runtime in host memory, for tests: allocations are anonymous files, handles are the paths to them.

It is stricter than it has to be: an allocation that is freed while somebody has it open is an error here, where CUDA
calls what follows undefined.
"""

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kvplane.kernels.errors import DeviceError

Value = TypeVar("Value")

DEVICE_BYTES = 1 << 30
_HANDLE = struct.Struct("<QQQ40x")  # process, descriptor, bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Allocation:
    descriptor: int
    array: "np.ndarray[tuple[int], np.dtype[np.uint8]]"


class EmulatedRuntime:
    """One device of `DEVICE_BYTES`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cpu")
        self.name = "emulated CUDA device"
        self._own: dict[int, _Allocation] = {}
        self._opened: dict[int, _Allocation] = {}
        self._events: dict[int, int] = {}
        """Recordings per event."""

    def free_bytes(self) -> int:
        """What is not allocated."""
        return DEVICE_BYTES - sum(each.array.nbytes for each in self._own.values())

    def malloc(self, num_bytes: int) -> int:
        """A file of its own."""
        free = self.free_bytes()
        if num_bytes > free:
            raise DeviceError("device", f"{num_bytes} bytes of device memory, {free} are free: out of memory")
        descriptor = os.memfd_create("kvplane-emulated", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        return self._map(descriptor, num_bytes, self._own)

    def free(self, pointer: int) -> None:
        """Close the file."""
        os.close(self._own.pop(pointer).descriptor)

    def export(self, pointer: int) -> bytes:
        """Process and descriptor."""
        found = self._own.get(pointer)
        if found is None:
            raise DeviceError("device", "exporting device memory: not the base of an allocation")
        return _HANDLE.pack(os.getpid(), found.descriptor, found.array.nbytes)

    def open(self, handle: bytes) -> int:
        """Map the file of the process."""
        pid, descriptor, num_bytes = _HANDLE.unpack(handle)
        if pid == os.getpid():
            raise DeviceError("device", "opening another process's device memory: it is this process's own")
        try:
            mine = os.open(Path(f"/proc/{pid}/fd/{descriptor}"), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError("device", f"opening another process's device memory: {error.strerror}") from error
        return self._map(mine, num_bytes, self._opened)

    def close(self, pointer: int) -> None:
        """Unmap it."""
        os.close(self._opened.pop(pointer).descriptor)

    def view(self, pointer: int, num_bytes: int) -> Tensor:
        """The file's bytes."""
        found = self._own.get(pointer) or self._opened[pointer]
        return torch.from_numpy(found.array)[:num_bytes]

    def new_event(self) -> int:
        """A counter."""
        self._events[len(self._events) + 1] = 0
        return len(self._events)

    def export_event(self, event: int) -> bytes:
        """Names it; what is launched has completed when a call returns, so nobody has to wait."""
        return _HANDLE.pack(os.getpid(), event, 0)

    def open_event(self, handle: bytes) -> int:
        """An event of another process."""
        pid, _, _ = _HANDLE.unpack(handle)
        if not Path(f"/proc/{pid}").exists():
            raise DeviceError("device", "opening another process's event: its process is gone")
        return self.new_event()

    def record(self, event: int) -> None:
        """Count."""
        self._events[event] += 1

    def wait(self, event: int) -> None:
        """Everything has completed; raises DeviceError for an event that is none."""
        if event not in self._events:
            raise DeviceError("device", f"waiting for an event: {event} is none")

    def destroy_event(self, event: int) -> None:
        """Forget it."""
        del self._events[event]

    def on_stream(self, job: Callable[[], Value], event: int | None = None) -> Value:
        """Run it."""
        result = job()
        if event is not None:
            self.record(event)
        return result

    def _map(self, descriptor: int, num_bytes: int, into: dict[int, _Allocation]) -> int:
        array = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        pointer = int(array.ctypes.data)
        into[pointer] = _Allocation(descriptor, array)
        return pointer
