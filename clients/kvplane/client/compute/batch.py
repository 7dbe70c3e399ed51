"""A forward pass as an engine asks for it, checked against what its session knows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvplane.client.state import SessionState
from kvplane.wire.errors import InvalidArgumentError, NotGrantedError

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_ROW_MASK = np.uint64(0xFFFF_FFFF)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of attention of a plan."""

    num_query_heads: int
    scale: float | None
    soft_cap: float | None
    window: int | None
    """Tokens that a token sees, itself included; None: all."""
    windows: Mapping[int, int | None]
    """The same for single layers."""

    def window_of(self, layer: int) -> int | None:
        """The window of a layer."""
        return self.windows.get(layer, self.window) if self.windows else self.window


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences of a plan; arrays of shape [sequences]."""

    sequence_ids: U64
    rows: I64
    query_lengths: I64
    kv_lengths: I64
    num_tokens: int


def batch_of(
    state: SessionState, sequence_ids: npt.ArrayLike, query_lengths: npt.ArrayLike, kv_lengths: npt.ArrayLike
) -> Batch:
    """Raises `InvalidArgumentError` for lengths that do not fit each other or the slots granted, and `NotGrantedError`
    for a sequence that is not one of the session's."""
    ids = _integers("sequence_ids", sequence_ids).astype(np.uint64)
    queries = _integers("query_lengths", query_lengths).astype(np.int64)
    lengths = _integers("kv_lengths", kv_lengths).astype(np.int64)
    if not len(ids) == len(queries) == len(lengths):
        sizes = f"{len(ids)} sequences, {len(queries)} query lengths, {len(lengths)} KV lengths"
        raise InvalidArgumentError.of("query_lengths", f"one of each per sequence expected, got {sizes}")
    table = state.sequences
    rows = (ids & _ROW_MASK).astype(np.int64)
    known = rows < len(table.ids)
    known[known] = table.ids[rows[known]] == ids[known]
    if not known.all():
        stranger = int(ids[known.argmin()])
        raise NotGrantedError(
            f"sequence {stranger} is not one of the session's", metadata={"sequence_id": str(stranger)}
        )
    if len(np.unique(rows)) != len(rows):
        raise InvalidArgumentError.of("sequence_ids", "a sequence is named twice")
    bad = (queries < 0) | (queries > lengths)
    if bad.any():
        index = int(bad.argmax())
        raise InvalidArgumentError.of(
            "query_lengths", f"sequence {ids[index]}: {queries[index]} of {lengths[index]} tokens are new"
        )
    slots = table.num_slots[rows]
    over = lengths > slots
    if over.any():
        index = int(over.argmax())
        raise InvalidArgumentError.of(
            "kv_lengths", f"sequence {ids[index]} has {slots[index]} token slots, {lengths[index]} are asked for"
        )
    return Batch(ids, rows, queries, lengths, int(queries.sum()))


def check_rows(name: str, rows: Tensor, shape: tuple[int, int, int]) -> None:
    """Raises `InvalidArgumentError` when a tensor has another shape."""
    if rows.shape != shape:
        raise InvalidArgumentError.of(name, f"shape {shape} expected, got {tuple(rows.shape)}")


def _integers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError.of(name, f"a list of integers expected, got {array.dtype} of shape {array.shape}")
    if array.size and array.dtype.kind == "i" and int(array.min()) < 0:
        raise InvalidArgumentError.of(name, f"{array.min()} is negative")
    return array
