"""What an applied step did to tokens and lengths of the session's sequences, in the service's order."""

from collections.abc import Collection

from kvplane.client.draft import StepDraft
from kvplane.client.sequences import SequenceTable, row_of
from kvplane.client.values import Skipped, StepOperation
from kvplane.wire.packed import U32Array, U64Array


def apply_draft(table: SequenceTable, draft: StepDraft, skipped: tuple[Skipped, ...]) -> None:
    """What the service did to tokens and lengths, in its order."""
    left_out: dict[StepOperation, set[int]] = {}
    for each in skipped:
        left_out.setdefault(each.operation, set()).add(each.sequence_id)
    for sequence_id, tokens in draft.observed:
        table.extend_tokens(table.row(sequence_id), tokens)
    for ids, tokens, committed, _ in draft.advanced:
        rows = (ids & 0xFFFF_FFFF).astype("int64")
        table.append(rows, tokens)
        late = left_out.get(StepOperation.ADVANCE, ())
        if late:
            kept = [sequence_id not in late for sequence_id in ids.tolist()]
            rows, committed = rows[kept], committed[kept]
        table.committed[rows] = committed
    for ids, lengths in draft.committed:
        for sequence_id, length in _pairs(ids, lengths, left_out.get(StepOperation.COMMIT, ())):
            table.committed[row_of(sequence_id)] = length
    for ids, lengths in draft.rolled_back:
        for sequence_id, length in _pairs(ids, lengths, left_out.get(StepOperation.ROLLBACK, ())):
            table.roll_back(row_of(sequence_id), length)
    for parent_id, children, _ in draft.forked:
        table.fork(parent_id, children)
    for ids, _ in draft.finished:
        for sequence_id in ids.tolist():
            table.finish(sequence_id)
    for message in draft.new:
        table.introduce(message)


def _pairs(ids: U64Array, lengths: U32Array, left_out: Collection[int]) -> list[tuple[int, int]]:
    return [pair for pair in zip(ids.tolist(), lengths.tolist(), strict=True) if pair[0] not in left_out]
