"""Numeric formats of the wire as torch has them."""

import torch

from kvplane.v1 import types_pb2
from kvplane.wire.errors import InvalidArgumentError, UnsupportedFeatureError

_TORCH: dict[int, torch.dtype] = {
    types_pb2.DATA_TYPE_FLOAT32: torch.float32,
    types_pb2.DATA_TYPE_FLOAT16: torch.float16,
    types_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
}
_WIRE: dict[torch.dtype, types_pb2.DataType.ValueType] = {
    torch.float32: types_pb2.DATA_TYPE_FLOAT32,
    torch.float16: types_pb2.DATA_TYPE_FLOAT16,
    torch.bfloat16: types_pb2.DATA_TYPE_BFLOAT16,
}


def torch_dtype(dtype: int) -> torch.dtype:
    """Raises `UnsupportedFeatureError` for a format that the kernels have not."""
    found = _TORCH.get(dtype)
    if found is None:
        raise UnsupportedFeatureError(f"data type {dtype} is not float32, float16 or bfloat16")
    return found


def wire_dtype(name: str, dtype: torch.dtype) -> types_pb2.DataType.ValueType:
    """The wire's number of a tensor's format. Raises `InvalidArgumentError` naming the tensor."""
    found = _WIRE.get(dtype)
    if found is None:
        raise InvalidArgumentError.of(name, f"{dtype} is not float32, float16 or bfloat16")
    return found
