"""The operations: arguments are checked here, then the device's backend runs."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplane.kernels.backend import backend_for
from kvplane.kernels.errors import DtypeError, ShapeError, SlotError, StrideError
from kvplane.kernels.paged_kv import NULL_BLOCK, SUPPORTED_DTYPES, KvGeometry, PagedKv
from kvplane.kernels.planning import AttentionPlan, Integers, integers
from kvplane.kernels.quantise import QUANTISED_DTYPES


def attend(
    plan: AttentionPlan,
    query: Tensor,
    layer: PagedKv,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the plan's rows over one layer; returns (out, lse), the given tensors where given.

    `query` and `out` [rows, query heads, head_dim], of any supported dtype and any strides but a contiguous
    last dimension; `lse` float32 [rows, query heads], the natural logarithm of the softmax denominator.
    Scores, softmax and sums are float32. The keys and values of this step's tokens must have been written.
    Padding rows and rows that see no key become zeros with LSE -inf.
    Raises ShapeError, DtypeError or StrideError.
    """
    _check_layer(plan.geometry, layer)
    shape = (plan.num_tokens, plan.num_query_heads, plan.geometry.head_dim)
    _check_rows("query", query, shape, plan.geometry.device)
    if out is None:
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    else:
        _check_rows("out", out, shape, plan.geometry.device)
    if lse is None:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
    elif lse.shape != shape[:2]:
        raise ShapeError("lse", f"{shape[:2]} expected, got {tuple(lse.shape)}")
    elif lse.dtype != torch.float32 or lse.device != query.device:
        raise DtypeError("lse", f"float32 on {query.device} expected, got {lse.dtype} on {lse.device}")
    if plan.num_tokens:
        backend_for(plan.geometry.device).attend(plan, query, layer, out, lse)
    return out, lse


def write(plan: AttentionPlan, key: Tensor, value: Tensor, layer: PagedKv) -> None:
    """Store this step's keys and values at the plan's slots; rows whose slot is -1 are skipped.

    `key` and `value` [rows, kv_heads, head_dim] in the cache's dtype, or in that of queries for a quantised cache,
    whose scales are then divided by (quantise.py has how it rounds); rows beyond the plan's (a padded batch)
    are ignored. Raises ShapeError, DtypeError or StrideError.
    """
    geometry = plan.geometry
    _check_layer(geometry, layer)
    for name, rows in (("key", key), ("value", value)):
        if (
            rows.dim() != 3
            or rows.shape[0] < plan.num_tokens
            or rows.shape[1:] != (geometry.num_kv_heads, geometry.head_dim)
        ):
            limit = f"[{plan.num_tokens} or more, {geometry.num_kv_heads}, {geometry.head_dim}] expected"
            raise ShapeError(name, f"{limit}, got {tuple(rows.shape)}")
        allowed = SUPPORTED_DTYPES if geometry.dtype in QUANTISED_DTYPES else (geometry.dtype,)
        if rows.dtype not in allowed or rows.device != geometry.device:
            raise DtypeError(name, f"{allowed} on {geometry.device} expected, got {rows.dtype} on {rows.device}")
        if rows.stride(2) != 1:
            raise StrideError(name, f"the head dimension must be contiguous, its stride is {rows.stride(2)}")
    backend_for(geometry.device).write(plan, key, value, layer)


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each; runs on the tensors' device.

    `out_*` [rows, heads, head_dim], `lse_*` [rows, heads] natural logarithms; -inf marks an empty set, whose
    output is not read. Two empty sets give zeros and -inf. `out` and `lse` may be any of the inputs. Computed
    in float32. Raises ShapeError.
    """
    for name, tensor, shape in (
        ("lse_a", lse_a, out_a.shape[:-1]),
        ("out_b", out_b, out_a.shape),
        ("lse_b", lse_b, out_a.shape[:-1]),
    ):
        if tensor.shape != shape:
            raise ShapeError(name, f"{tuple(shape)} expected, got {tuple(tensor.shape)}")
    top = torch.maximum(lse_a, lse_b)
    safe = top.masked_fill(top == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - safe), torch.exp(lse_b - safe)
    total = weight_a + weight_b
    both = safe + torch.log(total)
    total = total.masked_fill(total == 0, 1.0)
    merged = _weighted(out_a, weight_a / total) + _weighted(out_b, weight_b / total)
    result = torch.empty_like(out_a) if out is None else out
    result_lse = torch.empty_like(lse_a) if lse is None else lse
    result.copy_(merged)
    result_lse.copy_(both)
    return result, result_lse


def _weighted(values: Tensor, weight: Tensor) -> Tensor:
    # what has no weight may be NaN
    return torch.where(weight[..., None] == 0, 0.0, values.float() * weight[..., None])


def copy_blocks(layer: PagedKv, sources: Integers, destinations: Integers) -> None:
    """Copy block sources[i] to destinations[i], as if all were read before any is written.

    So chains and swaps work. Raises ShapeError or SlotError (a destination named twice, the null block, a
    block that does not exist).
    """
    read, written = (
        _block_ids("sources", sources, layer.geometry),
        _writable_blocks("destinations", destinations, layer.geometry),
    )
    if len(read) != len(written):
        raise ShapeError("destinations", f"as many as sources expected, got {len(written)} for {len(read)}")
    backend_for(layer.geometry.device).copy_blocks(layer, read, written)


def gather_blocks(layer: PagedKv, blocks: Integers) -> tuple[Tensor, Tensor]:
    """Keys and values of blocks in the canonical order: new tensors [blocks, block_size, kv_heads, head_dim].

    The order is the same whatever the layout, so it is what travels between pools.
    """
    ids = _block_ids("blocks", blocks, layer.geometry)
    key, value = (
        torch.empty(_canonical(layer, len(ids)), dtype=layer.geometry.dtype, device=layer.geometry.device)
        for _ in range(2)
    )
    backend_for(layer.geometry.device).gather_blocks(layer, ids, key, value)
    return key, value


def scatter_blocks(layer: PagedKv, blocks: Integers, key: Tensor, value: Tensor) -> None:
    """The inverse of `gather_blocks`. Raises ShapeError, DtypeError or SlotError."""
    ids = _writable_blocks("blocks", blocks, layer.geometry)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != _canonical(layer, len(ids)):
            raise ShapeError(name, f"{_canonical(layer, len(ids))} expected, got {tuple(tensor.shape)}")
        if tensor.dtype != layer.geometry.dtype or tensor.device != layer.geometry.device:
            raise DtypeError(
                name,
                f"{layer.geometry.dtype} on {layer.geometry.device} expected, got {tensor.dtype} on {tensor.device}",
            )
    backend_for(layer.geometry.device).scatter_blocks(layer, ids, key.contiguous(), value.contiguous())


def zero_blocks(layer: PagedKv, blocks: Integers) -> None:
    """Overwrite blocks with zero bytes. Raises SlotError."""
    ids = _writable_blocks("blocks", blocks, layer.geometry)
    backend_for(layer.geometry.device).zero_blocks(layer, ids)


def checksum_blocks(layer: PagedKv, blocks: Integers) -> NDArray[np.uint64]:
    """A checksum per block over its canonical bytes: equal for equal contents in any layout on any device."""
    ids = _block_ids("blocks", blocks, layer.geometry)
    return backend_for(layer.geometry.device).checksum_blocks(layer, ids)


def _canonical(layer: PagedKv, blocks: int) -> tuple[int, int, int, int]:
    geometry = layer.geometry
    return blocks, geometry.block_size, geometry.num_kv_heads, geometry.head_dim


def _check_layer(geometry: KvGeometry, layer: PagedKv) -> None:
    if layer.geometry is not geometry and layer.geometry != geometry:
        raise ShapeError("layer", f"the plan was made for {geometry}, the layer has {layer.geometry}")


def _check_rows(name: str, rows: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if rows.shape != shape:
        raise ShapeError(name, f"{shape} expected, got {tuple(rows.shape)}")
    if rows.dtype not in SUPPORTED_DTYPES or rows.device != device:
        raise DtypeError(name, f"one of {SUPPORTED_DTYPES} on {device} expected, got {rows.dtype} on {rows.device}")
    if rows.stride(-1) != 1:
        raise StrideError(name, f"the head dimension must be contiguous, its stride is {rows.stride(-1)}")


def _block_ids(name: str, blocks: Integers, geometry: KvGeometry) -> NDArray[np.int64]:
    ids = integers(name, blocks, 1)
    bad = ids[(ids < NULL_BLOCK) | (ids >= geometry.num_blocks)]
    if bad.size:
        raise SlotError(name, f"block {bad[0]} is not in 0..{geometry.num_blocks - 1}")
    return ids


def _writable_blocks(name: str, blocks: Integers, geometry: KvGeometry) -> NDArray[np.int64]:
    ids = _block_ids(name, blocks, geometry)
    if (ids == NULL_BLOCK).any():
        raise SlotError(name, "block 0 is the null block and is never written")
    if np.unique(ids).size != ids.size:
        raise SlotError(name, "a block is named twice; what it would hold is undefined")
    return ids
