"""A plan on a CUDA device: its work list in one buffer there, and the workspace. Laid out on the host, copied once."""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplane.kernels.cuda.launch_table import Constants
from kvplane.kernels.cuda.staging import to_device
from kvplane.kernels.errors import ShapeError
from kvplane.kernels.work_list import FIRST_PARTIAL, SPLITS, Splitting, WorkList, lay_out

if TYPE_CHECKING:
    from kvplane.kernels.planning import AttentionPlan

ITEM_COLUMNS = 8
TOKEN_COLUMNS = 6
# Parts of the buffer begin at multiples of 16 bytes, which the kernels were compiled for.
_ALIGNED_WORDS = 4

NARROW_SPLIT = 256  # keys; enough splits to fill a device with one long sequence, few enough to be merged cheaply
WIDE_SPLIT = 1024
UNSPLIT_ROWS = 256
PREFIX_SPLIT = 1024


def splitting(narrow: Constants, wide: Constants) -> Splitting:
    """Sizes of the work list for two kernels of the launch table."""
    return Splitting(narrow.rows, wide.rows, NARROW_SPLIT, WIDE_SPLIT, UNSPLIT_ROWS, PREFIX_SPLIT)


@dataclass(frozen=True, slots=True)
class Room:
    """How much of everything a buffer has room for; a kernel's grid follows from it."""

    narrow: int
    """Items of few rows."""
    wide: int
    """Items of many rows."""
    members: int
    tokens: int
    sequences: int
    table_width: int
    partials: int
    merges: int
    """Whether some token has no split or several: `merge_partials` writes those."""

    def holds(self, other: "Room") -> bool:
        """Whether everything of the other fits."""
        return all(own >= need for own, need in zip(astuple(self), astuple(other), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class HostWork:
    """A plan's work list as the kernels want it, on the host."""

    work: WorkList
    tables: NDArray[np.int32]
    slots: NDArray[np.int64]
    room: Room
    """What it needs."""

    def pack(self, room: Room) -> NDArray[np.int32]:
        """One buffer with room for more: items, tokens and tables that are not there do nothing."""
        buffer = np.zeros(Places.of(room).words, np.int32)
        places = Places.of(room)
        slots = np.full(room.tokens, -1, np.int64)
        slots[: len(self.slots)] = self.slots
        buffer[places.slots : places.slots + 2 * room.tokens] = slots.view(np.int32)
        for at, width, rows in (
            (places.tokens, TOKEN_COLUMNS, self.work.tokens),
            (places.narrow, ITEM_COLUMNS, self.work.narrow),
            (places.wide, ITEM_COLUMNS, self.work.wide),
            (places.members, 1, self.work.members[:, None]),
            (places.tables, room.table_width, self.tables),
        ):
            part = buffer[at : at + len(rows) * width].reshape(len(rows), width)
            part[:, : rows.shape[1]] = rows
        return buffer


@dataclass(frozen=True, slots=True)
class Places:
    """First words of the parts of a buffer."""

    slots: int
    tokens: int
    narrow: int
    wide: int
    members: int
    tables: int
    words: int

    @classmethod
    def of(cls, room: Room) -> "Places":
        """Where parts begin that have this much room."""
        sizes = (
            2 * room.tokens,
            TOKEN_COLUMNS * room.tokens,
            ITEM_COLUMNS * room.narrow,
            ITEM_COLUMNS * room.wide,
            room.members,
            room.sequences * room.table_width,
        )
        at = [0, *np.cumsum([-(-size // _ALIGNED_WORDS) * _ALIGNED_WORDS for size in sizes]).tolist()]
        return cls(at[0], at[1], at[2], at[3], at[4], at[5], words=max(at[6], _ALIGNED_WORDS))


@dataclass(frozen=True, slots=True, eq=False)
class HeadValues:
    """A number per query head, float32."""

    sinks: Tensor
    slopes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CudaWork:
    """What the kernels read and write besides the layer: all of it on the device, at addresses that do not change."""

    host: HostWork
    room: Room
    buffer: Tensor  # int32
    slots: Tensor  # int64 [tokens]
    tokens: Tensor
    narrow: Tensor
    wide: Tensor
    members: Tensor
    tables: Tensor
    heads: HeadValues
    partial_out: Tensor  # float32 [partials, query heads, head_dim]
    partial_lse: Tensor  # float32 [partials, query heads]


def lay_out_on_host(plan: "AttentionPlan", narrow: Constants, wide: Constants) -> HostWork:
    """The work list of a plan. Raises ShapeError for positions beyond 31 bits."""
    if plan.sequence_lengths.size and int(plan.sequence_lengths.max()) >= 1 << 31:
        raise ShapeError("sequence_lengths", f"below {1 << 31} expected, got {plan.sequence_lengths.max()}")
    work = lay_out(plan, splitting(narrow, wide))
    # A token of one split is written where it belongs at once, without a partial result.
    splits = work.tokens[:, SPLITS]
    stored = np.where(splits > 1, splits, 0)
    work.tokens[:, FIRST_PARTIAL] = np.cumsum(stored) - stored
    room = Room(
        narrow=len(work.narrow),
        wide=len(work.wide),
        members=len(work.members),
        tokens=plan.num_tokens,
        sequences=plan.block_tables.shape[0],
        table_width=plan.block_tables.shape[1],
        partials=int(stored.sum()),
        merges=int((splits != 1).any()),
    )
    if room.partials * plan.num_query_heads >= 1 << 31:
        raise ShapeError("sequence_lengths", f"{room.partials} partial results are more than one plan may have")
    return HostWork(work, plan.block_tables, plan.slots, room)


def place_on_device(plan: "AttentionPlan", host: HostWork) -> CudaWork:
    """Copy the work list and allocate the workspace."""
    room, device, heads = host.room, plan.geometry.device, plan.num_query_heads
    buffer = to_device(torch.from_numpy(host.pack(room)), device)
    places = Places.of(room)

    def part(begin: int, *shape: int) -> Tensor:
        return buffer[begin : begin + int(np.prod(shape))].view(shape)

    def per_head(given: Tensor | None, default: float) -> Tensor:
        return torch.full((heads,), default, dtype=torch.float32, device=device) if given is None else given

    return CudaWork(
        host=host,
        room=room,
        buffer=buffer,
        slots=buffer[: 2 * room.tokens].view(torch.int64),
        tokens=part(places.tokens, room.tokens, TOKEN_COLUMNS),
        narrow=part(places.narrow, room.narrow, ITEM_COLUMNS),
        wide=part(places.wide, room.wide, ITEM_COLUMNS),
        members=part(places.members, room.members),
        tables=part(places.tables, room.sequences, room.table_width),
        heads=HeadValues(per_head(plan.sinks, -float("inf")), per_head(plan.alibi_slopes, 0.0)),
        partial_out=torch.empty((room.partials, heads, plan.geometry.head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty((room.partials, heads), dtype=torch.float32, device=device),
    )


def refill(captured: "AttentionPlan", plan: "AttentionPlan") -> None:
    """Give a plan that a CUDA graph was captured with the batch of another one, in place and in stream order.

    What the graph's launches have baked in must agree: geometry, heads, rows, scale, soft cap, and which features are
    used. The captured plan needs room: make it for the largest batch to be replayed, whose lengths and tables bound the
    others'. Raises ShapeError, and has changed nothing then.
    """
    fixed = ("geometry", "num_query_heads", "num_tokens", "scale", "soft_cap")
    for name in fixed:
        if getattr(captured, name) != getattr(plan, name):
            raise ShapeError(name, f"the captured plan has {getattr(captured, name)}, not {getattr(plan, name)}")
    for name in ("sinks", "alibi_slopes"):
        if (getattr(captured, name) is None) != (getattr(plan, name) is None):
            raise ShapeError(name, "given to one of the plans only")
    into, given = captured.work, plan.work
    if not into.room.holds(given.host.room):
        raise ShapeError("plan", f"needs {given.host.room}, the captured plan has room for {into.room}")
    into.buffer.copy_(to_device(torch.from_numpy(given.host.pack(into.room)), plan.geometry.device))
    into.heads.sinks.copy_(given.heads.sinks)
    into.heads.slopes.copy_(given.heads.slopes)
