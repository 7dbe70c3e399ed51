"""Caches of one byte per element: what is stored is value / scale in the cache's format."""

import torch
from torch import Tensor

from kvplane.kernels.errors import DtypeError, ShapeError

QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.int8)
E4M3_MAX = 448.0
INT8_MAX = 127.0


def per_head(name: str, scale: Tensor | None, cache: torch.dtype, kv_heads: int, device: torch.device) -> Tensor | None:
    """The scales as float32 [kv_heads] on the layer's device; None where there are none, which means 1.

    Raises DtypeError for scales of a cache that is not quantised, ShapeError for anything but one scale or one per
    head, all positive.
    """
    if scale is None:
        return None
    if cache not in QUANTISED_DTYPES:
        raise DtypeError(name, f"scales belong to caches of {QUANTISED_DTYPES}, not of {cache}")
    if scale.numel() not in (1, kv_heads) or scale.dim() > 1:
        raise ShapeError(name, f"one scale or one per KV head ({kv_heads}) expected, got shape {tuple(scale.shape)}")
    scales = scale.detach().to(device, torch.float32, copy=True).expand(kv_heads).contiguous()
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ShapeError(name, "positive finite numbers expected")
    return scales


def quantised(rows: Tensor, scales: Tensor | None, cache: torch.dtype) -> Tensor:
    """Rows [tokens, kv_heads, head_dim] in the cache's format.

    Saturated; e4m3 is rounded to nearest, ties to even, and keeps NaN; int8 to nearest, halves up.
    """
    scaled = rows.detach().to(torch.float32)
    if scales is not None:
        scaled = scaled / scales[:, None]
    if cache == torch.int8:
        return torch.floor(scaled + 0.5).clamp(-INT8_MAX, INT8_MAX).to(cache)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(cache)
