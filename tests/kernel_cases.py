"""The cases every attention backend has to pass, and how to build one so that a wrong read shows.

Imports nothing but torch, numpy and the interface: a GPU run uses the same list.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplane import kernels
from kvplane.kernels import AttentionPlan, Layout, PagedKv
from kvplane.kernels.quantise import QUANTISED_DTYPES


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` holds (tokens in the cache, query tokens among them)."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    layout: Layout = Layout.HND
    interleaved: bool = False
    segments: int = 1
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    causal: bool = True
    shared_prefix_tokens: int = 0
    padding_tokens: int = 0
    spare_entries: int = 2  # table entries past the last block
    query_dtype: torch.dtype | None = None  # None: the cache's, float32 for a quantised one
    scales: str | None = None  # "tensor" or "heads", of a quantised cache
    sinks: bool = False
    alibi: bool = False

    @property
    def rows_dtype(self) -> torch.dtype:
        """Of queries and outputs."""
        usual = torch.float32 if self.dtype in QUANTISED_DTYPES else self.dtype
        return self.query_dtype or usual

    @property
    def spread(self) -> float:
        """Standard deviation of what is stored."""
        return 40.0 if self.dtype == torch.int8 else 1.0

    def key_and_value_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Unequal ones, that make values of about 1."""
        heads = torch.arange(1, self.kv_heads + 1 if self.scales == "heads" else 2) / self.spread
        return (0.5 * heads, 1.5 / heads / self.spread**2) if self.scales else (None, None)

    @property
    def sink_logits(self) -> Tensor | None:
        """[query heads], among the scores and beyond them; the last head has none."""
        heads = self.kv_heads * self.group
        if not self.sinks:
            return None
        return torch.tensor([*(3.0 * (head % 5) - 4 for head in range(heads - 1)), -torch.inf])

    @property
    def slopes(self) -> Tensor | None:
        """[query heads], as ALiBi (Press et al., 2022) has them."""
        heads = self.kv_heads * self.group
        return 2.0 ** (-8 * torch.arange(1, heads + 1) / heads) if self.alibi else None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A built case. Every slot, block and table entry the case does not use holds NaN or nonsense."""

    case: Case
    layer: PagedKv
    pools: tuple[Tensor, ...]  # what `layer` is a view of
    tables: NDArray[np.int64]
    query: Tensor

    def plan(self) -> AttentionPlan:
        """A new plan of the whole batch."""
        return self.plan_of(range(len(self.case.sequences)), self.case.padding_tokens)

    def plan_of(self, members: range, padding_tokens: int = 0) -> AttentionPlan:
        """A plan of some of the sequences."""
        case = self.case
        return kernels.plan(
            self.layer.geometry,
            self.tables[members.start : members.stop],
            [case.sequences[b][0] for b in members],
            [case.sequences[b][1] for b in members],
            num_query_heads=case.kv_heads * case.group,
            scale=case.scale,
            causal=case.causal,
            window=case.window,
            soft_cap=case.soft_cap,
            shared_prefix_tokens=case.shared_prefix_tokens,
            padding_tokens=padding_tokens,
            sinks=case.sink_logits,
            alibi_slopes=case.slopes,
        )

    def on(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        pools = tuple(pool.to(device) for pool in self.pools)
        return replace(self, layer=wrap(self.case, pools), pools=pools, query=self.query.to(device))

    def attend(self) -> tuple[Tensor, Tensor]:
        """Run the whole batch with a poisoned workspace into poisoned outputs."""
        plan = self.plan()
        poison(plan.work)
        out = torch.full_like(self.query, torch.nan)
        lse = torch.full(self.query.shape[:2], torch.nan, device=self.query.device)
        return kernels.attend(plan, self.query, self.layer, out=out, lse=lse)


def poison(work: Any) -> None:
    """Fill every floating point buffer of a backend's part of a plan with NaN."""
    for field in fields(work):
        buffer = getattr(work, field.name)
        if isinstance(buffer, np.ndarray) and buffer.dtype.kind == "f":
            buffer.fill(np.nan)
        elif isinstance(buffer, Tensor) and buffer.is_floating_point():
            buffer.fill_(torch.nan)


def pool_tensors(case: Case, num_blocks: int, fill: float = torch.nan) -> tuple[PagedKv, tuple[Tensor, ...]]:
    """A layer of `num_blocks` blocks in the case's layout, and the tensors under it."""
    inner = (case.block_size, case.kv_heads) if case.layout is Layout.NHD else (case.kv_heads, case.block_size)
    sizes = [num_blocks // case.segments] * case.segments
    sizes[-1] += num_blocks - sum(sizes)
    if case.interleaved:
        shapes: list[tuple[int, ...]] = [(size, 2, *inner, case.head_dim) for size in sizes]
    else:
        shapes = [(size, *inner, case.head_dim) for size in 2 * sizes]
    # int8 has no NaN; its largest number shows as well
    number = torch.full((1,), 127 if case.dtype == torch.int8 and fill != fill else fill).to(case.dtype)
    pools = [number.expand(shape).clone() for shape in shapes]
    return wrap(case, tuple(pools)), tuple(pools)


def wrap(case: Case, pools: tuple[Tensor, ...]) -> PagedKv:
    """A layer over tensors: interleaved ones, or those of the keys and then those of the values."""
    key, value = case.key_and_value_scales()
    if case.interleaved:
        return PagedKv.interleaved(pools, layout=case.layout, key_scale=key, value_scale=value)
    keys, values = pools[: case.segments], pools[case.segments :]
    return PagedKv.of(keys, values, layout=case.layout, key_scale=key, value_scale=value)


def block_views(layer: PagedKv, block: int) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, block_size, head_dim] of one block."""
    for key, value in zip(layer.keys, layer.values, strict=True):
        if block < key.shape[0]:
            return key[block], value[block]
        block -= key.shape[0]
    raise IndexError(block)


def build(case: Case, seed: int = 0) -> Batch:
    """Random contents at random places, in random block order; tables end in nonsense."""
    random = np.random.default_rng(seed)
    torch_random = torch.Generator().manual_seed(seed)
    needed = [-(-length // case.block_size) for length, _ in case.sequences]
    num_blocks = 1 + sum(needed) + 4
    layer, pools = pool_tensors(case, num_blocks)
    free = list(random.permutation(np.arange(1, num_blocks)))
    width = max([*needed, 0]) + case.spare_entries
    tables = random.choice(np.array([-1, np.iinfo(np.int32).max, num_blocks]), (len(needed), width))
    shared = case.shared_prefix_tokens // case.block_size
    for b, (length, _) in enumerate(case.sequences):
        tables[b, : needed[b]] = [free.pop() for _ in range(needed[b])]
        if length and b:
            tables[b, :shared] = tables[0, :shared]
        for i in range(needed[b]):
            filled = min(case.block_size, length - i * case.block_size)
            for part in block_views(layer, int(tables[b, i])):
                shape = (case.kv_heads, filled, case.head_dim)
                part[:, :filled] = (case.spread * torch.randn(shape, generator=torch_random)).to(case.dtype)
    rows = sum(queries for _, queries in case.sequences) + case.padding_tokens
    query = torch.randn(rows, case.kv_heads * case.group, case.head_dim, generator=torch_random).to(case.rows_dtype)
    return Batch(case, layer, pools, tables, query)


_EDGES = ((1, 1), (15, 1), (16, 1), (17, 1), (511, 1), (512, 1), (513, 1), (0, 1))
_MIXED = ((1, 1), (3, 3), (300, 16), (5, 5), (0, 0), (129, 1), (700, 40), (64, 64), (0, 3), (33, 2))
_PREFIXED = ((1100, 1), (1111, 1), (1040, 2), (1300, 40), (1024, 1))

SMALL: tuple[Case, ...] = (
    Case("decode", ((5, 1), (16, 1), (33, 1))),
    Case("chunk", ((40, 7), (20, 20))),
    Case("window", ((40, 3), (17, 1)), window=9),
    Case("soft cap", ((40, 3), (17, 1)), soft_cap=2.0),
    Case("empty", ((0, 1), (7, 1)), padding_tokens=2),
    Case("sinks", ((40, 3), (17, 1), (0, 2)), sinks=True, window=9),
    Case("ALiBi", ((40, 7), (17, 1)), alibi=True),
)
"""Small enough for an interpreter."""

MATRIX: tuple[Case, ...] = (
    *SMALL,
    Case("edges of blocks and splits", _EDGES),
    Case("mixed", _MIXED, padding_tokens=5),
    Case("mixed, not causal", _MIXED, causal=False),
    Case("mixed, NHD", _MIXED, layout=Layout.NHD),
    Case("mixed, interleaved", _MIXED, interleaved=True),
    Case("mixed, interleaved NHD", _MIXED, interleaved=True, layout=Layout.NHD),
    Case("mixed, three segments", _MIXED, segments=3),
    Case("mixed, soft cap", _MIXED, soft_cap=3.0, scale=0.5),
    Case("mixed, sinks", _MIXED, sinks=True, padding_tokens=2),
    Case("mixed, ALiBi", _MIXED, alibi=True, group=3),
    Case("mixed, sinks, ALiBi, soft cap, window", _MIXED, sinks=True, alibi=True, soft_cap=3.0, window=65),
    Case("shared prefix, sinks and ALiBi", _PREFIXED, shared_prefix_tokens=1024, sinks=True, alibi=True),
    Case("shared prefix", _PREFIXED, shared_prefix_tokens=1024),
    Case("shared prefix, not whole splits", _PREFIXED, shared_prefix_tokens=1008),
    Case("shared prefix, many rows", ((1030, 1),) * 20, shared_prefix_tokens=1024, group=7),
    *(
        Case(f"mixed, {name}, scale per {scales}", _MIXED, dtype, scales=scales, layout=layout)
        for name, dtype in (("e4m3", torch.float8_e4m3fn), ("int8", torch.int8))
        for scales, layout in (("tensor", Layout.NHD), ("heads", Layout.HND))
    ),
    *(Case(f"window {window}", _MIXED, window=window) for window in (1, 15, 16, 17, 64, 513)),
    *(Case(f"group {group}", _MIXED[:8], group=group, kv_heads=1) for group in (1, 3, 7, 8, 16, 71)),
    *(Case(f"head dim {dim}", _MIXED[:6], head_dim=dim) for dim in (16, 80, 96, 112, 128, 256)),
    *(Case(f"block size {size}", _MIXED, block_size=size) for size in (1, 8, 32, 64, 128, 256)),
)

ALL: tuple[Case, ...] = (
    *MATRIX,
    *(
        replace(case, name=f"{case.name}, {name}", dtype=dtype)
        for case in MATRIX
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
        if case.name
        in ("decode", "mixed", "mixed, NHD", "mixed, soft cap", "window 17", "shared prefix", "group 3", "mixed, ALiBi")
    ),
)
