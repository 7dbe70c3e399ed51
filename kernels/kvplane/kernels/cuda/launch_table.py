"""Every launch that the CUDA backend may make, with the constants it is compiled with.

Nothing outside this table is launched: what a pool or a plan would need beyond it is refused when the pool or the plan
is made. The constants were chosen offline: the first of a list, fastest expected first, that compiles without a spilled
register for every architecture (`python -m kvplane.kernels.cuda.aot` checks them all). Nobody has measured them on a
device yet. Block sizes, group sizes, windows and the number of sequences are arguments of a launch, not constants.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvplane.kernels.errors import UnsupportedFeatureError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, INT8 = torch.float8_e4m3fn, torch.int8

QUANTISED = (E4M3, INT8)
"""Cache formats with scales."""

E4M3_CAPABILITY = 89
"""Lowest compute capability (10 * major + minor) whose hardware converts e4m3."""

LOWEST_CAPABILITY = 80


@dataclass(frozen=True, slots=True)
class Constants:
    """What a kernel is compiled with."""

    rows: int
    """Packed query rows of a program."""
    tile: int
    """Keys at a time."""
    num_warps: int
    num_stages: int
    """Tiles in flight."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Constants for few rows (decode, short chunks) and for many (prefill, shared prefixes)."""

    narrow: Constants
    wide: Constants


@dataclass(frozen=True, slots=True)
class AttendLaunch:
    """One compilation of `attend_items`."""

    query: torch.dtype
    cache: torch.dtype
    head_dim: int
    general: bool
    """With soft cap, ALiBi and segments."""
    wide: bool
    constants: Constants


@dataclass(frozen=True, slots=True)
class MergeLaunch:
    """One compilation of `merge_partials`."""

    out: torch.dtype
    padded_dim: int


@dataclass(frozen=True, slots=True)
class WriteLaunch:
    """One compilation of `write_slots`."""

    rows: torch.dtype
    cache: torch.dtype
    padded_dim: int


Launch = AttendLaunch | MergeLaunch | WriteLaunch

_DECODE = Constants(16, 64, 4, 3)
_DECODE_LARGE = Constants(16, 64, 8, 3)
_SMALL = Pair(_DECODE, Constants(64, 64, 8, 2))
_USUAL = Pair(_DECODE, Constants(64, 32, 8, 2))
_PADDED = Pair(_DECODE, Constants(32, 32, 4, 2))
_LARGE = Pair(_DECODE_LARGE, Constants(32, 32, 8, 2))

ATTEND: dict[tuple[torch.dtype, torch.dtype, int], Pair] = {
    **{(each, each, 64): _SMALL for each in (BF16, FP16)},
    **{(each, each, dim): _PADDED for each in (BF16, FP16) for dim in (80, 96, 112)},
    **{(each, each, 128): _USUAL for each in (BF16, FP16)},
    **{(each, each, dim): _LARGE for each in (BF16, FP16) for dim in (192, 256)},
    (FP32, FP32, 64): Pair(_DECODE_LARGE, Constants(32, 32, 4, 2)),
    (FP32, FP32, 128): Pair(_DECODE_LARGE, Constants(32, 16, 8, 2)),
    (BF16, E4M3, 64): _SMALL,
    (BF16, INT8, 64): _USUAL,
    (BF16, E4M3, 128): _SMALL,
    (BF16, INT8, 128): _USUAL,
    (BF16, E4M3, 256): _LARGE,
}
"""By query dtype, cache dtype and head dimension."""

MERGE_SPLITS = 16
"""Partial results that a program of `merge_partials` weighs at a time."""

WRITE_HEADS = 4
"""KV heads that a program of `write_slots` serves."""

SMALL_WARPS = 4
"""Warps of the kernels that only move data."""


def padded(head_dim: int) -> int:
    """Lanes along the head dimension: a power of two, at least 64 so that fewer kernels are compiled."""
    return max(64, 1 << (head_dim - 1).bit_length())


def check_cache(cache: torch.dtype, head_dim: int, capability: int | None) -> None:
    """Whether some launch serves such a cache; raises UnsupportedFeatureError. `capability` None: the interpreter."""
    if capability is not None and capability < LOWEST_CAPABILITY:
        raise UnsupportedFeatureError(
            "device", f"compute capability {capability / 10} is below {LOWEST_CAPABILITY / 10}"
        )
    dims = sorted({dim for _, held, dim in ATTEND if held == cache})
    if head_dim not in dims:
        known = f"head dimensions {dims}" if dims else "no head dimension"
        raise UnsupportedFeatureError(
            "head_dim", f"{head_dim} with a {cache} cache is not built on CUDA, it has {known}"
        )
    if cache == E4M3 and capability is not None and capability < E4M3_CAPABILITY:
        raise UnsupportedFeatureError(
            "keys.dtype", f"{cache} needs compute capability {E4M3_CAPABILITY / 10}, this device has {capability / 10}"
        )


def query_dtypes(cache: torch.dtype, head_dim: int) -> tuple[torch.dtype, ...]:
    """Dtypes of queries that may meet such a cache."""
    return tuple(query for query, held, dim in ATTEND if (held, dim) == (cache, head_dim))


def attend(query: torch.dtype, cache: torch.dtype, head_dim: int) -> Pair:
    """Constants of both kernels; raises UnsupportedFeatureError."""
    found = ATTEND.get((query, cache, head_dim))
    if found is None:
        known = ", ".join(str(each) for each in query_dtypes(cache, head_dim))
        raise UnsupportedFeatureError(
            "query.dtype", f"{query} with a {cache} cache of head dimension {head_dim} is not built on CUDA: {known}"
        )
    return found


def sizes(cache: torch.dtype, head_dim: int) -> Pair:
    """Rows of the items of a plan, which are the same for all dtypes of queries."""
    return attend(query_dtypes(cache, head_dim)[0], cache, head_dim)


def launches() -> Iterator[Launch]:
    """Every entry."""
    for (query, cache, head_dim), pair in ATTEND.items():
        for general in (False, True):
            yield AttendLaunch(query, cache, head_dim, general, False, pair.narrow)
            yield AttendLaunch(query, cache, head_dim, general, True, pair.wide)
    for padded_dim in (64, 128, 256):
        for out in sorted({query for query, _, dim in ATTEND if padded(dim) == padded_dim}, key=str):
            yield MergeLaunch(out, padded_dim)
        pairs = {(query, cache) for query, cache, dim in ATTEND if padded(dim) == padded_dim}
        for rows, cache in sorted(pairs, key=str):
            yield WriteLaunch(rows, cache, padded_dim)
