"""What a shard's blocks lie on: host memory, or a CUDA device. Everything that differs between the two is here."""

import os
import re
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from kvplane.compute import memory
from kvplane.compute.config import ComputeConfig
from kvplane.compute.layout import PoolLayout
from kvplane.compute.memory import SharedMemory
from kvplane.kernels import KernelError
from kvplane.kernels.cuda import emulation, staging
from kvplane.kernels.cuda import runtime as cuda_runtime
from kvplane.kernels.cuda.memory import DeviceMemory
from kvplane.v1 import registry_pb2
from kvplane.wire.errors import LimitExceededError

_log = structlog.get_logger(__name__)

Value = TypeVar("Value")


class BlocksMemory(Protocol):
    """The memory of a pool's block tensors."""

    @property
    def num_bytes(self) -> int:
        """Size."""
        ...

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All of it as one dimension."""
        ...

    def release(self, users: Sequence[int], *, unlink: bool) -> None:
        """Give it up. `users` are pidfds of processes that have mapped it; they stay the caller's. With `unlink` nobody
        finds it again."""
        ...


class Device(Protocol):
    """Where blocks lie and kernels run. Used on the device thread, but for what is said to be otherwise."""

    @property
    def kind(self) -> registry_pb2.DeviceKind.ValueType:
        """As the wire names it."""
        ...

    @property
    def index(self) -> int:
        """Number on its host."""
        ...

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def survives(self) -> bool:
        """Whether a later process finds the memory again."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether tensors of callers can be worked on where they are."""
        ...

    def available_bytes(self) -> int:
        """Bytes that a pool may take at this moment. Any thread."""
        ...

    def allocate(self, path: Path, num_bytes: int) -> BlocksMemory:
        """Zeroed memory for block tensors; `path` is its name where it has one. Raises `LimitExceededError`."""
        ...

    def run(self, job: Callable[[], Value]) -> Value:
        """Run a job; when this returns, everything it launched has completed."""
        ...

    def inbound(self, tensor: Tensor) -> Tensor:
        """A caller's tensor where kernels can read it."""
        ...

    def outbound(self, tensor: Tensor) -> Tensor:
        """A result on the host, complete."""
        ...

    def warm_up(self, layout: PoolLayout) -> None:
        """Compile what a pool of this layout needs. Any thread. Raises `RuntimeError` for layouts it has no kernels
        for."""
        ...

    def event_handle(self) -> bytes:
        """Handle of the event that is recorded behind every job; empty on the host."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """Block tensors in a named file."""

    shared: SharedMemory

    @property
    def num_bytes(self) -> int:
        """Size."""
        return self.shared.num_bytes

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All of it as one dimension."""
        return torch.frombuffer(self.shared.mapping, dtype=dtype)

    def release(self, users: Sequence[int], *, unlink: bool) -> None:  # noqa: ARG002 - mappings outlive the name
        """Give it up; who has mapped it keeps it."""
        if unlink:
            self.shared.unlink()
        self.shared.close()


class HostDevice:
    """CPU and shared memory."""

    kind = registry_pb2.DEVICE_KIND_CPU
    index = 0
    name = "host memory"
    survives = True
    is_host = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def available_bytes(self) -> int:
        """What the folder's file system has left."""
        return memory.available_bytes(self._folder)

    def allocate(self, path: Path, num_bytes: int) -> HostBlocks:
        """A file."""
        return HostBlocks(memory.create(path, num_bytes))

    def run(self, job: Callable[[], Value]) -> Value:
        """Kernels return when they have completed."""
        return job()

    def inbound(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def outbound(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def warm_up(self, layout: PoolLayout) -> None:
        """Compile, or load what was compiled before."""
        # numba comes with it
        from kvplane.kernels.cpu.warm_up import warm_up

        warm_up((layout.dtype,))

    def event_handle(self) -> bytes:
        """None."""
        return b""


class DeviceBlocks:
    """Block tensors in a base allocation of a device, which other processes open by its handle."""

    def __init__(self, device: "CudaDevice", allocated: DeviceMemory) -> None:
        self._device = device
        self._allocated = allocated

    @property
    def num_bytes(self) -> int:
        """Size."""
        return self._allocated.num_bytes

    @property
    def handle(self) -> bytes:
        """CUDA IPC handle of all of it."""
        return self._allocated.handle

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All of it as one dimension."""
        return self._allocated.flat(dtype)

    def release(self, users: Sequence[int], *, unlink: bool) -> None:  # noqa: ARG002 - it has no name
        """Free it once the last process that has it open is gone: before, what they launch would be undefined."""
        self._device.free_after(self._allocated, users)


class CudaDevice:
    """A CUDA device, and a stream of its own for everything this service launches."""

    kind = registry_pb2.DEVICE_KIND_CUDA
    survives = False
    is_host = False

    def __init__(self, index: int) -> None:
        """Raises `RuntimeError` that says in one line what is missing."""
        try:
            self._runtime = cuda_runtime.runtime_of(index)
            self._event = self._runtime.new_event()
        except KernelError as error:
            raise RuntimeError(f"device: cuda:{index} cannot be used: {error.description}") from error
        self.index = index
        self.name = self._runtime.name
        self._lingering: list[tuple[DeviceMemory, list[int]]] = []
        """Memory that was given up while processes had it open, and their pidfds."""

    def available_bytes(self) -> int:
        """What is free at this moment."""
        return self._runtime.free_bytes()

    def allocate(self, path: Path, num_bytes: int) -> DeviceBlocks:  # noqa: ARG002 - device memory has no name
        """A base allocation. Raises `LimitExceededError`, saying so when memory of an older pool is still open."""
        self._free_unused()
        try:
            return DeviceBlocks(self, DeviceMemory(self._runtime, num_bytes))
        except KernelError as error:
            held = sum(each.num_bytes for each, _ in self._lingering)
            why = f"; {held} bytes of older pools are still open in attached processes" if held else ""
            raise LimitExceededError(
                f"{error.description}{why}",
                metadata={"limit": "device_memory_bytes", "value": str(self.available_bytes())},
            ) from error

    def free_after(self, allocated: DeviceMemory, users: Sequence[int]) -> None:
        """Free memory when these processes are gone."""
        self._lingering.append((allocated, [os.dup(pidfd) for pidfd in users]))
        self._free_unused()

    def run(self, job: Callable[[], Value]) -> Value:
        """Run a job on the device's stream, record the event behind it, and wait."""
        return self._runtime.on_stream(job, self._event)

    def inbound(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return staging.to_device(tensor, self._runtime.torch_device)

    def outbound(self, tensor: Tensor) -> Tensor:
        """A copy on the host."""
        return staging.to_host(tensor)

    def warm_up(self, layout: PoolLayout) -> None:
        """Compile, or load what was compiled before."""
        # Triton comes with it, which nobody has to have who has no device.
        from kvplane.kernels.cuda.warm_up import warm_up

        device = self._runtime.torch_device
        try:
            cuda_runtime.check_cache(device, layout.dtype, layout.head_dim)
            self._runtime.on_stream(lambda: warm_up(device, layout.dtype, layout.head_dim))
        except KernelError as error:
            raise RuntimeError(f"device: cuda:{self.index} cannot serve this model: {error}") from error

    def event_handle(self) -> bytes:
        """Attached processes order their work behind the service's by it."""
        return self._runtime.export_event(self._event)

    def _free_unused(self) -> None:
        kept = []
        for allocated, users in self._lingering:
            running = [pidfd for pidfd in users if not _ended(pidfd)]
            for pidfd in set(users) - set(running):
                os.close(pidfd)
            if running:
                kept.append((allocated, running))
            else:
                allocated.free()
        self._lingering = kept


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def device_of(config: ComputeConfig) -> Device:
    """The device that a configuration asks for. Raises `RuntimeError` that says in one line why it cannot be used."""
    asked = re.fullmatch(r"cuda(?::(\d+))?", config.device)
    if asked is not None:
        return CudaDevice(int(asked[1] or 0))
    if config.device == "auto" and not emulation.wanted():
        reason = cuda_runtime.why_not()
        if reason is None:
            return CudaDevice(0)
        _log.info("device: host memory", no_cuda=reason)
    return HostDevice(config.memory_folder)
