"""What an engine tells a restarted cache service: its sequences, their tables, and blocks its device still works on.

The control plane keeps no journal; after a restart it asks those who hold the truth. What is declared is the state as
of the last result. Steps that were not answered are sent again behind it, under new numbers.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvplane.client.device_work import DeviceWork
from kvplane.client.draft import StepDraft
from kvplane.client.sequences import I32, I64, RUNS, U64, SequenceTable, row_of
from kvplane.client.values import Cut, SequenceState
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.packed import U32Array, U64Array, pack_u32, pack_u64, unpack_u32, unpack_u64

Pair = tuple[U64Array, U32Array]

PART_BYTES = 16 * 2**20
"""Size from which a declaration goes on in another message."""


def declaration(
    table: SequenceTable, work: DeviceWork, last_sent_step: int, lost: Sequence[Cut]
) -> Iterator[cache_pb2.StepRequest]:
    """The parts of a declaration, in order; the last one says so. `lost` is what `lost_copies` found."""
    request = cache_pb2.StepRequest()
    size = 0
    whole = {row_of(cut.sequence_id): cut.num_slots for cut in lost}
    for row in table.rows_in_use.tolist():
        sequence = _declared(table, row, whole.get(row))
        size += sequence.ByteSize()
        if size > PART_BYTES and request.declaration.sequences:
            yield request
            request, size = cache_pb2.StepRequest(), sequence.ByteSize()
        request.declaration.sequences.append(sequence)
    last = request.declaration
    completed = work.declared_completed(last_sent_step)
    for each in work.deferred_behind(min(completed)):
        last.deferred.add(blocks=_blocks(each.ids, each.generations), step_id=each.step_id)
    last.last_sent_step = last_sent_step
    last.completed_steps = pack_u64(completed)
    last.last = True
    yield request


def lost_copies(table: SequenceTable, work: DeviceWork) -> list[Cut]:
    """Children whose tails were not copied yet: they have only their whole blocks."""
    cuts = []
    for copy in work.copies_pending():
        rows, entries = np.nonzero(
            (table.blocks == copy.destination_id) & (table.generations == np.uint64(copy.destination_generation))
        )
        for row, entry in zip(rows.tolist(), entries.tolist(), strict=True):
            if table.state[row] in RUNS:
                cuts.append(Cut(int(table.ids[row]), entry * table.block_tokens, "COPY_LOST"))
    return cuts


def apply_cuts(table: SequenceTable, result: cache_pb2.DeclarationResult) -> list[Cut]:
    """Shorten the tables as the service decided."""
    ids = unpack_u64("declared.cut_sequence_ids", result.cut_sequence_ids)
    tokens = unpack_u32("declared.cut_tokens", result.cut_tokens, len(ids))
    reasons = unpack_u32("declared.cut_reasons", result.cut_reasons, len(ids))
    cuts = []
    for sequence_id, kept, reason in zip(ids.tolist(), tokens.tolist(), reasons.tolist(), strict=True):
        row = table.row(sequence_id)
        if kept:
            table.cut_table(row, kept)
        else:
            table.change(row, SequenceState.PREEMPTED)
        cuts.append(Cut(sequence_id, kept, _reason(reason)))
    return cuts


def after_cuts(draft: StepDraft, cuts: Mapping[int, int], table: SequenceTable) -> StepDraft:
    """A step that had no answer, as it means after `cuts` (sequence -> token slots kept).

    The service would have skipped what crossed a preemption or an admission; after a declaration it takes every step
    as made with all knowledge, so that is left out here. Tokens stay known. Lengths that are written are no longer than
    what was kept. A child of a parent that does not run becomes a sequence of its own with the parent's tokens.
    """
    gone = {int(each) for each in table.ids[~np.isin(table.state, RUNS)] if each}
    running = {int(each) for each in table.ids[np.isin(table.state, RUNS)]}
    made = StepDraft(table)
    made.max_admissions, made.token_budget = draft.max_admissions, draft.token_budget
    made.observed = list(draft.observed)
    made.rolled_back = [_without(pair, gone) for pair in draft.rolled_back]
    made.committed = [_clamped(_without(pair, gone), cuts) for pair in draft.committed]
    made.extended = [_without(pair, gone) for pair in draft.extended]
    for ids, tokens, committed, slots in draft.advanced:
        lost = np.array([sequence_id in gone for sequence_id in ids.tolist()], np.bool_)
        made.observed += [(int(ids[at]), tokens[at : at + 1]) for at in np.flatnonzero(lost).tolist()]
        kept_ids, kept_committed = _clamped((ids[~lost], committed[~lost]), cuts)
        made.advanced.append((kept_ids, tokens[~lost], kept_committed, slots[~lost]))
    made.finished = list(draft.finished)
    made.new = list(draft.new)
    asked = [pair for pair in zip(draft.order, draft.chunks, strict=True) if pair[0] not in running]
    made.order, made.chunks = [each for each, _ in asked], [chunk for _, chunk in asked]
    for parent_id, children, num_tokens in draft.forked:
        if parent_id not in gone:
            made.forked.append((parent_id, children, num_tokens))
            continue
        parent = table.row(parent_id)
        tokens = table.tokens_of(parent_id)
        tokens = np.concatenate([tokens, *(more for each, more in made.observed if each == parent_id)])
        for child in children:
            message = type(table.prompts[parent])()
            message.CopyFrom(table.prompts[parent])
            message.sequence_id, message.tokens = child, pack_u32(tokens)
            made.new.append(message)
            made.order.append(child)
            made.chunks.append(0)
    return made


def _declared(table: SequenceTable, row: int, most_committed: int | None) -> cache_pb2.DeclaredSequence:
    committed = int(table.committed[row])
    declared = cache_pb2.DeclaredSequence(
        num_prompt_tokens=min(int(table.prompt_tokens[row]), int(table.known[row])),
        num_committed=committed if most_committed is None else min(committed, most_committed),
        state=int(table.state[row]),  # type: ignore[arg-type] # the numbers are the contract's
    )
    declared.sequence.CopyFrom(table.prompts[row])
    declared.sequence.sequence_id = int(table.ids[row])
    declared.sequence.tokens = table.tokens[row, : table.known[row]].tobytes()
    if table.num_blocks[row]:
        held = slice(0, int(table.num_blocks[row]))
        declared.table.append(_blocks(table.blocks[row, held], table.generations[row, held]))
    return declared


def _blocks(ids: I64 | I32, generations: U64) -> types_pb2.BlockList:
    return types_pb2.BlockList(block_ids=pack_u32(ids), generations=pack_u64(generations))


def _without(pair: Pair, gone: set[int]) -> Pair:
    ids, values = pair
    kept = np.array([sequence_id not in gone for sequence_id in ids.tolist()], np.bool_)
    return ids[kept], values[kept]


def _clamped(pair: Pair, cuts: Mapping[int, int]) -> Pair:
    ids, lengths = pair
    limits = np.array([cuts.get(sequence_id, 2**32 - 1) for sequence_id in ids.tolist()], np.uint32)
    return ids, np.minimum(lengths, limits)


def _reason(number: int) -> str:
    known = {each.number: each.name for each in cache_pb2.CutReason.DESCRIPTOR.values}
    return known.get(number, str(number)).removeprefix("CUT_REASON_")
