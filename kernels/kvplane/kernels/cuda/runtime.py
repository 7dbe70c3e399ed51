"""The calls of the CUDA runtime that pools and attached processes are made of: allocations, handles, events, streams.

Memory that other processes map is a whole allocation of cudaMalloc: a handle opens the allocation that a pointer lies
in, from its base. So nothing comes out of a caching allocator, and offsets travel beside the handle. Interprocess
handles do not survive a fork: processes are spawned.
"""

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.utils.dlpack
from torch import Tensor

from kvplane.kernels.cuda import emulation, launch_table
from kvplane.kernels.errors import DeviceError

Value = TypeVar("Value")

HANDLE_BYTES = 64
_EVENT_FLAGS = 2 | 4  # without timing, for several processes
_LAZY_PEER_ACCESS = 1


class Runtime(Protocol):
    """One device as this process sees it. Pointers and events are integers; every failure is a DeviceError."""

    @property
    def index(self) -> int:
        """Number of the device among those this process sees."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where torch has its tensors."""
        ...

    @property
    def name(self) -> str:
        """For people."""
        ...

    def free_bytes(self) -> int:
        """Memory that is free at this moment."""
        ...

    def malloc(self, num_bytes: int) -> int:
        """A base allocation; raises DeviceError when the device has not so much."""
        ...

    def free(self, pointer: int) -> None:
        """Give an allocation back. Everybody who opened it has closed it, or is gone."""
        ...

    def export(self, pointer: int) -> bytes:
        """The handle of a base allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; raises DeviceError when the handle does not open."""
        ...

    def close(self, pointer: int) -> None:
        """Unmap it."""
        ...

    def view(self, pointer: int, num_bytes: int) -> Tensor:
        """Bytes at a pointer as a tensor uint8, without copying them. It does not keep them alive."""
        ...

    def new_event(self) -> int:
        """An event that other processes can wait for."""
        ...

    def export_event(self, event: int) -> bytes:
        """Its handle."""
        ...

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        ...

    def record(self, event: int) -> None:
        """Mark this point of torch's current stream."""
        ...

    def wait(self, event: int) -> None:
        """Let torch's current stream go on only after the newest mark."""
        ...

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        ...

    def on_stream(self, job: Callable[[], Value], event: int | None = None) -> Value:
        """Run a job on a stream of its own and wait until all it launched has completed; `event` is recorded behind
        it."""
        ...


class CudaRuntime:
    """A device through CuPy and torch."""

    def __init__(self, index: int) -> None:
        """Raises DeviceError when the device is not there."""
        reason = why_not(index)
        if reason is not None:
            raise DeviceError("device", reason)
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        cupy: Any = importlib.import_module("cupy")
        self._cupy = cupy
        self._runtime: Any = cupy.cuda.runtime
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def free_bytes(self) -> int:
        """Memory that is free at this moment."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def malloc(self, num_bytes: int) -> int:
        """A base allocation."""
        free = self.free_bytes()
        return int(self._call(f"{num_bytes} bytes of device memory, {free} are free", "malloc", num_bytes))

    def free(self, pointer: int) -> None:
        """Give an allocation back."""
        self._call("freeing device memory", "free", pointer)

    def export(self, pointer: int) -> bytes:
        """The handle of a base allocation."""
        return bytes(self._call("exporting device memory", "ipcGetMemHandle", pointer))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation."""
        return int(
            self._call(
                "opening another process's device memory (both need the same device and, in containers, one PID and "
                "one IPC namespace: pid and ipc `service:…` or `host`)",
                "ipcOpenMemHandle",
                handle,
                _LAZY_PEER_ACCESS,
            )
        )

    def close(self, pointer: int) -> None:
        """Unmap it."""
        self._call("closing another process's device memory", "ipcCloseMemHandle", pointer)

    def view(self, pointer: int, num_bytes: int) -> Tensor:
        """Bytes at a pointer."""
        cupy = self._cupy
        # CuPy has no bfloat16 and no float8: bytes cross by DLPack, torch views them.
        memory = cupy.cuda.UnownedMemory(pointer, num_bytes, self, self.index)
        array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        found: Tensor = torch.utils.dlpack.from_dlpack(array)
        return found

    def new_event(self) -> int:
        """An event that other processes can wait for."""
        return int(self._call("making an event", "eventCreateWithFlags", _EVENT_FLAGS))

    def export_event(self, event: int) -> bytes:
        """Its handle."""
        return bytes(self._call("exporting an event", "ipcGetEventHandle", event))

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        return int(self._call("opening another process's event", "ipcOpenEventHandle", handle))

    def record(self, event: int) -> None:
        """Mark this point of torch's current stream."""
        self._call("recording an event", "eventRecord", event, torch.cuda.current_stream(self.index).cuda_stream)

    def wait(self, event: int) -> None:
        """Let torch's current stream go on only after the newest mark."""
        stream = torch.cuda.current_stream(self.index).cuda_stream
        self._call("waiting for an event", "streamWaitEvent", stream, event)

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._call("destroying an event", "eventDestroy", event)

    def on_stream(self, job: Callable[[], Value], event: int | None = None) -> Value:
        """Run a job on the device's own stream, and wait."""
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._stream):
            try:
                result = job()
                if event is not None:
                    self.record(event)
            finally:
                self._stream.synchronize()
        return result

    def _call(self, what: str, function: str, *arguments: Any) -> Any:
        try:
            with self._cupy.cuda.Device(self.index):
                return getattr(self._runtime, function)(*arguments)
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError("device", f"{what}: {error}") from error


def why_not(index: int = 0) -> str | None:
    """In one line, what keeps this process from using a CUDA device; None when nothing does."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1 is not there)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install its CUDA build"
    if not torch.cuda.is_available():
        return "the NVIDIA driver finds no device, or is older than torch's CUDA " + torch.version.cuda
    count = torch.cuda.device_count()
    if index >= count:
        return f"there is no device {index}, this process sees {count}"
    for module in ("triton", "cupy"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"CUDA needs the extra kvplane[gpu]: {error}"
    return None


def capability(device: torch.device) -> int | None:
    """Compute capability as 10 * major + minor; None where kernels are emulated."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_cache(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Whether a pool of this kind can be served there; raises UnsupportedFeatureError."""
    launch_table.check_cache(dtype, head_dim, capability(device))


@functools.cache
def runtime_of(index: int) -> Runtime:
    """The runtime of a device, an emulated one where emulation was asked for. Raises DeviceError."""
    if emulation.wanted():
        from kvplane.kernels.cuda.emulated_runtime import EmulatedRuntime

        return EmulatedRuntime(index)
    return CudaRuntime(index)
