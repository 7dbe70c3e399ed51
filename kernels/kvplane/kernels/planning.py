"""Everything about a batch that all layers of a step share: validated once, then only read."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvplane.kernels.backend import backend_for
from kvplane.kernels.errors import DtypeError, ShapeError, SlotError, TableError, UnsupportedFeatureError
from kvplane.kernels.paged_kv import NULL_BLOCK, KvGeometry

Integers = ArrayLike | Tensor | Sequence[int]
PADDING_SLOT = -1


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """A batch, checked against the geometry it will run on. Build one with `plan`, once per step.

    Sequence b has `sequence_lengths[b]` tokens in the cache, the last `query_lengths[b]` of which are this
    step's; the query rows of all sequences follow each other, then come rows of padding up to `num_tokens`.
    `slots[row]` = block id * block_size + offset is where the row's key and value go, -1 where nowhere.

    A plan serves one call at a time: concurrent calls are safe and take turns.
    """

    geometry: KvGeometry
    block_tables: NDArray[np.int32]  # [sequences, blocks]
    sequence_lengths: NDArray[np.int64]  # [sequences]
    query_lengths: NDArray[np.int64]  # [sequences]
    num_tokens: int
    slots: NDArray[np.int64]  # [num_tokens]
    num_query_heads: int
    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    shared_prefix_tokens: int
    sinks: Tensor | None = None  # float32 [num_query_heads]
    alibi_slopes: Tensor | None = None  # float32 [num_query_heads]
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    work: Any = field(init=False, repr=False)  # the backend's own: work list, workspace, device copies

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", backend_for(self.geometry.device).prepare(self))

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.geometry.num_kv_heads


def plan(
    geometry: KvGeometry,
    block_tables: Integers,
    sequence_lengths: Integers,
    query_lengths: Integers | None = None,
    *,
    num_query_heads: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    shared_prefix_tokens: int = 0,
    padding_tokens: int = 0,
    slots: Integers | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> AttentionPlan:
    """Validate a batch and lay out its work. The arguments are copied: changing them later changes nothing.

    `block_tables` [sequences, blocks] int; entries past a sequence's length, and entries that left its
    window, are never looked at. `query_lengths` None means one token each (decode). `scale` None means
    1/sqrt(head_dim). `window` W: a token sees W keys, itself included. `soft_cap` c: scores become
    c * tanh(score / c). `shared_prefix_tokens`: a multiple of the block size; the tables of all sequences
    agree on it, and it is read once for the whole batch (cascade). `slots` [rows] overrides where new keys
    and values go; all -1 makes a plan that only reads, whose tables may name a block in two places.
    `sinks` [num_query_heads]: logits that take part in the softmax of every row that sees a key, and carry no
    value. `alibi_slopes` [num_query_heads], causal only: slope * (key position - query position) is added to a
    score, after the soft cap. `tree_mask` is part of the interface and not built: anything but None is refused.

    A sequence of length 0 is padding: its rows come out as zeros with LSE -inf, and nothing is written.
    Raises ShapeError, DtypeError, TableError, SlotError or UnsupportedFeatureError.
    """
    if tree_mask is not None:
        raise UnsupportedFeatureError("tree_mask", "not built yet; pass None")
    lengths = integers("sequence_lengths", sequence_lengths, 1)
    queries = np.ones_like(lengths) if query_lengths is None else integers("query_lengths", query_lengths, 1)
    tables = integers("block_tables", block_tables, 2)
    _check_sizes(geometry, tables, lengths, queries, num_query_heads, padding_tokens)
    if window is not None and (window < 1 or not causal):
        raise ShapeError("window", f"at least 1, and only with causal=True; got {window}, causal={causal}")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ShapeError("soft_cap", f"a positive number expected, got {soft_cap}")
    if scale is not None and not abs(scale) < float("inf"):
        raise ShapeError("scale", f"a finite number expected, got {scale}")
    if alibi_slopes is not None and not causal:
        raise UnsupportedFeatureError("alibi_slopes", "are built for causal attention only")
    first_visible = np.zeros_like(lengths)
    if window is not None:
        first_visible = np.maximum(lengths - queries + 1 - window, 0)
    _check_tables(geometry, tables, lengths, first_visible)
    _check_shared_prefix(geometry, tables, lengths, window, shared_prefix_tokens)
    num_tokens = int(queries.sum()) + padding_tokens
    own_slots = (
        _slots_of(geometry, tables, lengths, queries, num_tokens) if slots is None else integers("slots", slots, 1)
    )
    _check_slots(geometry, own_slots, num_tokens)
    return AttentionPlan(
        geometry=geometry,
        block_tables=_frozen(np.where((tables >= 0) & (tables < geometry.num_blocks), tables, 0), np.int32),
        sequence_lengths=_frozen(lengths, np.int64),
        query_lengths=_frozen(queries, np.int64),
        num_tokens=num_tokens,
        slots=_frozen(own_slots, np.int64),
        num_query_heads=num_query_heads,
        scale=geometry.head_dim**-0.5 if scale is None else float(scale),
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        shared_prefix_tokens=shared_prefix_tokens,
        sinks=_per_head("sinks", sinks, num_query_heads, geometry),
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, num_query_heads, geometry),
    )


def _per_head(name: str, values: Tensor | None, num_query_heads: int, geometry: KvGeometry) -> Tensor | None:
    """A copy in float32 on the layer's device."""
    if values is None:
        return None
    if values.shape != (num_query_heads,):
        raise ShapeError(name, f"one per query head, ({num_query_heads},), expected, got {tuple(values.shape)}")
    if not values.is_floating_point():
        raise DtypeError(name, f"a floating point tensor expected, got {values.dtype}")
    return values.detach().to(geometry.device, torch.float32, copy=True).contiguous()


def _frozen(array: NDArray[Any], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    copy = np.array(array, dtype, order="C")
    copy.flags.writeable = False
    return copy


def integers(name: str, values: Integers, dimensions: int) -> NDArray[np.int64]:
    """The values as a new int64 array of so many dimensions; raises DtypeError or ShapeError."""
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.size == 0 and not isinstance(values, (Tensor, np.ndarray)):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise DtypeError(name, f"integers expected, got {array.dtype}")
    if array.ndim != dimensions:
        raise ShapeError(name, f"{dimensions} dimensions expected, got shape {array.shape}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DtypeError(name, f"{int(array.max())} does not fit 64 signed bits")
    return array.astype(np.int64)


def _check_sizes(
    geometry: KvGeometry,
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    queries: NDArray[np.int64],
    num_query_heads: int,
    padding_tokens: int,
) -> None:
    if tables.shape[0] != len(lengths) or len(queries) != len(lengths):
        sizes = f"{tables.shape[0]} tables, {len(lengths)} sequence lengths, {len(queries)} query lengths"
        raise ShapeError("block_tables", f"one row and one length per sequence expected, got {sizes}")
    if num_query_heads < 1 or num_query_heads % geometry.num_kv_heads:
        limit = f"a multiple of {geometry.num_kv_heads} KV heads expected"
        raise ShapeError("num_query_heads", f"{limit}, got {num_query_heads}")
    if padding_tokens < 0:
        raise ShapeError("padding_tokens", f"at least 0 expected, got {padding_tokens}")
    for name, values in (("sequence_lengths", lengths), ("query_lengths", queries)):
        if len(values) and values.min() < 0:
            raise ShapeError(name, f"at least 0 expected, got {values.min()} for sequence {values.argmin()}")
    wrong = np.flatnonzero((queries > lengths) & (lengths > 0))
    if wrong.size:
        b = wrong[0]
        raise ShapeError("query_lengths", f"sequence {b} has {queries[b]} query tokens but only {lengths[b]} in all")


def _check_tables(
    geometry: KvGeometry,
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    first_visible: NDArray[np.int64],
) -> None:
    needed = -(-lengths // geometry.block_size)
    if len(needed) and needed.max() > tables.shape[1]:
        b = int(needed.argmax())
        raise TableError(
            "block_tables",
            f"sequence {b} of {lengths[b]} tokens needs {needed[b]} blocks, its table has {tables.shape[1]}",
        )
    column = np.arange(tables.shape[1])
    visible = (column >= (first_visible // geometry.block_size)[:, None]) & (column < needed[:, None])
    bad = visible & ((tables <= NULL_BLOCK) | (tables >= geometry.num_blocks))
    if bad.any():
        b, i = (int(index[0]) for index in np.nonzero(bad))
        raise TableError(
            "block_tables",
            f"entry {i} of sequence {b} is {tables[b, i]}, allowed is 1..{geometry.num_blocks - 1}",
        )


def _check_shared_prefix(
    geometry: KvGeometry,
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    window: int | None,
    shared: int,
) -> None:
    if shared == 0:
        return
    name = "shared_prefix_tokens"
    if shared < 0 or shared % geometry.block_size:
        raise ShapeError(name, f"a multiple of the block size {geometry.block_size} expected, got {shared}")
    if window is not None:
        raise UnsupportedFeatureError(name, "a sliding window leaves no prefix that all tokens see; pass 0")
    members = np.flatnonzero(lengths > 0)
    if members.size and lengths[members].min() < shared:
        b = members[lengths[members].argmin()]
        raise ShapeError(name, f"{shared} is more than the {lengths[b]} tokens of sequence {b}")
    prefix = tables[members, : shared // geometry.block_size]
    if members.size and (prefix != prefix[0]).any():
        b = members[np.flatnonzero((prefix != prefix[0]).any(axis=1))[0]]
        raise TableError(name, f"the table of sequence {b} differs from that of sequence {members[0]} in the prefix")


def _slots_of(
    geometry: KvGeometry,
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    queries: NDArray[np.int64],
    num_tokens: int,
) -> NDArray[np.int64]:
    slots = np.full(num_tokens, PADDING_SLOT, np.int64)
    sequence = np.repeat(np.arange(len(lengths)), queries)
    row = np.arange(len(sequence))
    position = row - np.repeat(np.cumsum(queries) - lengths, queries)
    real = position >= 0 if tables.shape[1] else np.zeros(len(sequence), np.bool_)
    sequence, position = sequence[real], position[real]
    blocks = tables[sequence, position // geometry.block_size]
    slots[row[real]] = blocks * geometry.block_size + position % geometry.block_size
    return slots


def _check_slots(geometry: KvGeometry, slots: NDArray[np.int64], num_tokens: int) -> None:
    if len(slots) != num_tokens:
        raise ShapeError("slots", f"one per row expected, got {len(slots)} for {num_tokens} rows")
    used = slots[slots != PADDING_SLOT]
    end = geometry.num_blocks * geometry.block_size
    bad = used[(used < geometry.block_size) | (used >= end)]
    if bad.size:
        raise SlotError("slots", f"{bad[0]} is not {PADDING_SLOT} and not in {geometry.block_size}..{end - 1}")
    if np.unique(used).size != used.size:
        raise SlotError("slots", "a slot is named by two rows; which of them would win is undefined")
