"""Tensors of a run: views into arenas or copies from messages, checked before anything is launched."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from kvplane.compute.arenas import SLICE_ALIGNMENT, Arenas
from kvplane.compute.dtypes import torch_dtype, wire_dtype
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.features import refuse

INPUTS = (types_pb2.TENSOR_ROLE_QUERY, types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE)
RESULTS = (types_pb2.TENSOR_ROLE_OUTPUT, types_pb2.TENSOR_ROLE_LSE)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Where a result goes."""

    tensor: torch.Tensor
    message: compute_pb2.Tensor
    """As the request has it."""
    inline: bool

    def encode(self) -> compute_pb2.Tensor:
        """The result for the answer: with its bytes where it travels inline."""
        if not self.inline:
            return self.message
        return compute_pb2.Tensor(
            role=self.message.role,
            dtype=wire_dtype(self.tensor.dtype),
            shape=self.tensor.shape,
            inline=self.tensor.view(torch.uint8).numpy().tobytes(),
        )


class RunTensors:
    """The tensors of one run by role. Raises `InvalidArgumentError`, naming the tensor, when they are malformed."""

    def __init__(self, tensors: Iterable[compute_pb2.Tensor], arenas: Arenas, session_id: int) -> None:
        self._arenas = arenas
        self._session_id = session_id
        self._messages: dict[int, compute_pb2.Tensor] = {}
        self._read: list[torch.Tensor] = []
        self._written: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.role not in INPUTS and tensor.role not in RESULTS:
                raise refuse(f"a tensor of role {tensor.role}", "run.tensors.role")
            if tensor.role in self._messages:
                raise InvalidArgumentError.of(_name(tensor.role), "is given twice")
            self._messages[tensor.role] = tensor

    def query_shape(self) -> tuple[int, ...]:
        """Shape of the queries, unchecked but for its three dimensions."""
        shape = tuple(self._message(types_pb2.TENSOR_ROLE_QUERY).shape)
        if len(shape) != 3:
            raise InvalidArgumentError.of("run.tensors.QUERY.shape", f"has {len(shape)} dimensions, not 3")
        return shape

    def take(
        self, role: types_pb2.TensorRole.ValueType, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """An input of this shape, and of this dtype unless it is None."""
        message = self._message(role)
        if message.WhichOneof("location") == "arena":
            tensor = self._slice(message, shape, dtype)
        else:
            found = self._checked(message, shape, dtype)
            if len(message.inline) != prod(shape) * found.itemsize:
                raise InvalidArgumentError.of(
                    _name(role), f"has {len(message.inline)} bytes, its shape needs {prod(shape) * found.itemsize}"
                )
            # A copy: torch does not take memory that it may not write.
            data = np.frombuffer(message.inline, np.uint8).copy()
            tensor = torch.from_numpy(data).view(found).view(shape) if len(data) else torch.empty(shape, dtype=found)
        self._read.append(tensor)
        return tensor

    def result(
        self, role: types_pb2.TensorRole.ValueType, shape: tuple[int, ...], default: torch.dtype, *, wanted: bool
    ) -> Result | None:
        """Where a result goes: as named in the run, else inline when `wanted`, else None."""
        message = self._messages.get(role)
        if message is None:
            if not wanted:
                return None
            message = compute_pb2.Tensor(role=role, dtype=wire_dtype(default), shape=shape)
        dtype = torch.float32 if role == types_pb2.TENSOR_ROLE_LSE else None
        if message.WhichOneof("location") != "arena":
            return Result(torch.empty(shape, dtype=self._checked(message, shape, dtype)), message, inline=True)
        tensor = self._slice(message, shape, dtype)
        self._written.append(tensor)
        return Result(tensor, message, inline=False)

    @property
    def in_arenas(self) -> bool:
        """Whether nothing travels inline."""
        return all(message.WhichOneof("location") == "arena" for message in self._messages.values())

    def check_overlap(self) -> None:
        """Raises when a result would overwrite an input or another result."""
        for index, written in enumerate(self._written):
            for other in (*self._read, *self._written[index + 1 :]):
                first, second = written.data_ptr(), other.data_ptr()
                if first < second + other.nbytes and second < first + written.nbytes:
                    raise InvalidArgumentError.of("run.tensors.arena", "a result overlaps another tensor")

    def _message(self, role: types_pb2.TensorRole.ValueType) -> compute_pb2.Tensor:
        message = self._messages.get(role)
        if message is None:
            raise InvalidArgumentError.of(_name(role), "is missing")
        return message

    def _checked(self, message: compute_pb2.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.dtype:
        name = _name(message.role)
        if tuple(message.shape) != shape:
            raise InvalidArgumentError.of(f"{name}.shape", f"is {list(message.shape)}, not {list(shape)}")
        found = torch_dtype(message.dtype, f"{name}.dtype")
        if dtype is not None and found != dtype:
            raise InvalidArgumentError.of(f"{name}.dtype", f"is {found}, not {dtype}")
        return found

    def _slice(self, message: compute_pb2.Tensor, shape: tuple[int, ...], wanted: torch.dtype | None) -> torch.Tensor:
        arena = self._arenas.get(message.arena.arena_id, self._session_id)
        dtype = self._checked(message, shape, wanted)
        offset, count = message.arena.offset, prod(shape)
        name = f"{_name(message.role)}.arena.offset"
        if offset % SLICE_ALIGNMENT:
            raise InvalidArgumentError.of(name, f"{offset} is no multiple of {SLICE_ALIGNMENT}")
        end = offset + count * dtype.itemsize
        if end > arena.shared.num_bytes:
            raise InvalidArgumentError.of(name, f"ends at byte {end} of {arena.shared.num_bytes}")
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(arena.shared.mapping, dtype=dtype, count=count, offset=offset).view(shape)


def _name(role: types_pb2.TensorRole.ValueType) -> str:
    return f"run.tensors.{types_pb2.TensorRole.Name(role).removeprefix('TENSOR_ROLE_')}"
