"""Numeric formats of the wire as torch has them."""

import torch

from kvplane.v1 import types_pb2
from kvplane.wire.errors import InvalidArgumentError

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
KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Names of `ModelIdentity.kv_dtype` that this service stores."""


def torch_dtype(dtype: int, field: str) -> torch.dtype:
    """Raises `InvalidArgumentError` for a format that the kernels have not."""
    found = _TORCH.get(dtype)
    if found is None:
        raise InvalidArgumentError.of(field, f"{dtype} is not float32, float16 or bfloat16")
    return found


def wire_dtype(dtype: torch.dtype) -> types_pb2.DataType.ValueType:
    """The wire's number of a format."""
    return _WIRE[dtype]
