"""Plans: which sequences a step works on, checked against what was granted, filled and sealed.

A plan is checked as a whole when it is opened and again before every run, since generations, seals and fill levels may
have changed in between. Used on the device thread alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvplane import kernels
from kvplane.compute.layout import PoolLayout
from kvplane.compute.occupancy import Ids, Occupancy, Slots
from kvplane.compute.tables import Table, not_granted
from kvplane.kernels import AttentionPlan, KernelError, KvGeometry
from kvplane.v1 import compute_pb2
from kvplane.wire.errors import InvalidArgumentError, NotGrantedError
from kvplane.wire.features import refuse
from kvplane.wire.packed import U32Array, U64Array, unpack_u32, unpack_u64

KERNEL_PLANS = 8
"""Kernel plans that an open plan keeps; clients choose the options they are made for."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a kernel plan depends on beyond the sequences."""

    num_query_heads: int
    scale: float | None = None
    soft_cap: float | None = None
    causal: bool = True
    alibi_slopes: tuple[float, ...] = ()
    sinks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sequences of a plan and every block that it may touch. Arrays of blocks are parallel."""

    sequence_ids: U64Array
    table: Ids
    """Entries of all sequences up to their lengths, one sequence after the other."""
    table_lengths: npt.NDArray[np.int64]
    """Entries per sequence."""
    query_lengths: npt.NDArray[np.int64]
    kv_lengths: npt.NDArray[np.int64]
    ids: Ids
    """Blocks that some token of the step sees."""
    generations: U64Array
    read_ends: Slots
    """Slots of each block that must be filled before the plan writes."""
    written_ids: Ids
    """Blocks that the step's tokens go to."""
    written_generations: U64Array
    write_starts: Slots
    write_ends: Slots
    num_tokens: int
    """New tokens of all sequences."""
    num_seen: int
    """Cached tokens of all sequences."""

    def block_tables(self) -> Ids:
        """The tables as the kernels take them, shape [sequences, blocks]; 0 beyond a sequence's end."""
        lengths = self.table_lengths
        padded = np.zeros((len(lengths), int(lengths.max(initial=0))), np.int64)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = self.table
        return padded


@dataclass(slots=True, eq=False)
class OpenPlan:
    """A plan between `open` and `close`."""

    batch: Batch
    options: compute_pb2.AttentionOptions
    deadline: float | None
    """Seconds of `time.monotonic`."""
    ended: bool = False
    """Its blocks are not its own any more: it pins none and runs nothing."""
    written_layers: set[int] = field(default_factory=set)
    checked: dict[tuple[bool, bool], int] = field(default_factory=dict)
    """Count of changes at which the blocks were last checked, by whether the run wrote and whether it read what it
    appends."""
    prepared: dict[AttentionShape, AttentionPlan] = field(default_factory=dict)
    usual: tuple[int, AttentionPlan] | None = None
    """Query heads of the newest run under the plan's own options, and its kernel plan."""

    def kernel_plan(self, shape: AttentionShape, geometry: KvGeometry, window: int | None) -> AttentionPlan:
        """The kernels' part, made once per shape. Raises `InvalidArgumentError`."""
        found = self.prepared.get(shape)
        if found is None:
            batch = self.batch
            try:
                found = kernels.plan(
                    geometry,
                    batch.block_tables(),
                    batch.kv_lengths,
                    batch.query_lengths,
                    num_query_heads=shape.num_query_heads,
                    scale=shape.scale,
                    causal=shape.causal,
                    window=window,
                    soft_cap=shape.soft_cap,
                    alibi_slopes=torch.tensor(shape.alibi_slopes) if shape.alibi_slopes else None,
                    sinks=torch.tensor(shape.sinks) if shape.sinks else None,
                )
            except KernelError as error:
                raise InvalidArgumentError.of(error.field, error.description) from error
            if len(self.prepared) >= KERNEL_PLANS:
                del self.prepared[next(iter(self.prepared))]
            self.prepared[shape] = found
        return found


def batch_of(plan: compute_pb2.Plan, tables: Mapping[int, Table], layout: PoolLayout, max_sequences: int) -> Batch:
    """The blocks a plan touches. Raises `InvalidArgumentError` for lengths that do not fit and for more sequences than
    the session's `max_sequences` or one named twice, `NotGrantedError` for a sequence without a table or a block that
    left its window."""
    sequence_ids = unpack_u64("plan.sequence_ids", plan.sequence_ids)
    count = len(sequence_ids)
    # A few bytes name a whole table: without this a small message costs seconds and gigabytes.
    if count > max_sequences:
        raise InvalidArgumentError.of("plan.sequence_ids", f"{count} sequences, the session may have {max_sequences}")
    if len(np.unique(sequence_ids)) != count:
        raise InvalidArgumentError.of("plan.sequence_ids", "a sequence is named twice")
    queries = unpack_u32("plan.query_lengths", plan.query_lengths, count).astype(np.int64)
    lengths = unpack_u32("plan.kv_lengths", plan.kv_lengths, count).astype(np.int64)
    if (queries > lengths).any():
        index = int((queries > lengths).argmax())
        raise InvalidArgumentError.of(
            "plan.query_lengths", f"sequence {sequence_ids[index]}: {queries[index]} of {lengths[index]} tokens are new"
        )
    size = layout.block_tokens
    needed = -(-lengths // size)
    ids, generations = _gather(sequence_ids, needed, tables)
    row = np.repeat(np.arange(count), needed)
    first_slot = (np.arange(len(row)) - np.repeat(np.cumsum(needed) - needed, needed)) * size
    written = (lengths - queries)[row]
    seen_from = np.zeros(count, np.int64)
    if layout.window_tokens is not None:
        seen_from = np.maximum(lengths - queries + 1 - layout.window_tokens, 0)
    visible = first_slot + size > seen_from[row]
    missing = visible & (ids == 0)
    if missing.any():
        index = int(missing.argmax())
        raise NotGrantedError(
            f"sequence {sequence_ids[row[index]]}: the block of token {first_slot[index]} left its window",
            metadata={"sequence_id": str(sequence_ids[row[index]])},
        )
    read_ends = np.clip(written - first_slot, 0, size)
    # Every query token's block is written, or read from the start of what the step appends.
    appended = (first_slot + size > written) & (queries[row] > 0)
    return Batch(
        sequence_ids=sequence_ids,
        table=ids,
        table_lengths=needed,
        query_lengths=queries,
        kv_lengths=lengths,
        ids=ids[visible],
        generations=generations[visible],
        read_ends=read_ends[visible],
        written_ids=ids[appended],
        written_generations=generations[appended],
        write_starts=read_ends[appended],
        write_ends=np.clip(lengths[row] - first_slot, 0, size)[appended],
        num_tokens=int(queries.sum()),
        num_seen=int(lengths.sum()),
    )


def _gather(sequence_ids: U64Array, needed: npt.NDArray[np.int64], tables: Mapping[int, Table]) -> tuple[Ids, U64Array]:
    """Ids and generations of the first `needed` entries of each table, concatenated."""
    ids: list[U32Array] = []
    generations: list[U64Array] = []
    for sequence_id, entries in zip(sequence_ids.tolist(), needed.tolist(), strict=True):
        table = tables.get(sequence_id)
        if table is None:
            raise not_granted(sequence_id)
        if entries > len(table.block_ids):
            raise InvalidArgumentError.of(
                "plan.kv_lengths",
                f"sequence {sequence_id} has {len(table.block_ids)} blocks, its length needs {entries}",
            )
        ids.append(table.block_ids[:entries])
        generations.append(table.generations[:entries])
    if not ids:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    return np.concatenate(ids).astype(np.int64), np.concatenate(generations)


def check_read(occupancy: Occupancy, batch: Batch, session_id: int, *, with_appended: bool) -> None:
    """Whether the step may read: everything before its own tokens, and `with_appended` those as well."""
    occupancy.check_readable(batch.ids, batch.generations, batch.read_ends, session_id)
    if with_appended:
        occupancy.check_readable(batch.written_ids, batch.written_generations, batch.write_ends, session_id)


def check_options(options: compute_pb2.AttentionOptions, field_name: str) -> None:
    """Raises `UnsupportedFeatureError` for options whose behaviour is not built."""
    if options.tree_mask:
        raise refuse("tree_mask", f"{field_name}.tree_mask")


def shape_of(options: compute_pb2.AttentionOptions, num_query_heads: int) -> AttentionShape:
    """What the kernels need of the options."""
    return AttentionShape(
        num_query_heads,
        options.scale if options.HasField("scale") else None,
        options.soft_cap or None,
        options.causal if options.HasField("causal") else True,
        tuple(options.alibi_slopes),
        tuple(options.sinks),
    )
