"""Tokens that became known, and KV that is written: observe, commit, rollback."""

import numpy as np

from kvplane.cache.core import chains
from kvplane.cache.core.arrays import I64, U32, spans
from kvplane.cache.core.sequences import Status
from kvplane.cache.core.state import PoolState, StepContext
from kvplane.wire.digests import block_digest, extend_each
from kvplane.wire.identity import Digest

_ZERO = np.int64(0)
_ONE = np.int64(1)
_NULL = np.uint32(0)


def observe(state: PoolState, rows: I64, counts: I64, tokens: U32) -> None:
    """Append known tokens: `counts[i]` of `tokens` to `rows[i]`, running or not."""
    columns = state.rows
    running = columns.status[rows] == Status.RUNNING
    known = columns.known[rows] + counts
    if not running.all():
        ends = counts.cumsum()
        for index in np.flatnonzero(~running).tolist():
            part = tokens[int(ends[index] - counts[index]) : int(ends[index])]
            columns.record(int(rows[index])).tokens += part.tobytes()
        tokens = tokens[np.repeat(running, counts)]
    columns.known[rows] = known
    live, counts, known = rows[running], counts[running], known[running]
    for index in np.flatnonzero(known > columns.room[live]).tolist():
        columns.ensure_room(int(live[index]), int(known[index]))
    columns.extents.tokens[spans(columns.token_base[live] + known - counts, counts)] = tokens


def commit(state: PoolState, context: StepContext, rows: I64, lengths: I64) -> None:
    """KV is written up to `lengths` tokens: full blocks go to sealing, those that left the window go."""
    columns = state.rows
    columns.committed[rows] = lengths
    next_fill = columns.next_fill[rows]
    full = (lengths >= next_fill).nonzero()[0]
    if len(full):
        rows_full, size = rows[full], state.block_size
        first, end = next_fill[full] // size - _ONE, lengths[full] // size
        columns.next_fill[rows_full] = (end + _ONE) * size
        _fill(state, rows_full, first, end, context.now)
    if not state.rules.prefix_closed:
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            _expire(state, context, row, length)


def rollback(state: PoolState, context: StepContext, rows: I64, lengths: I64) -> None:
    """Cut the known tokens to `lengths` and release the table entries behind them."""
    columns, size = state.rows, state.config.block_tokens
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        keep = -(-length // size)
        sequence = columns.record(row)
        if int(columns.hashed[row]) * size > length:
            whole = length // size
            if sequence.frontier is not None and sequence.frontier >= whole:
                state.set_frontier(sequence, None)
            sequence.chain = sequence.chain.cut(whole)
            columns.hashed[row] = whole
            columns.set_tail(row, sequence.chain.digest(whole - 1))
        columns.known[row] = length
        released = columns.table(row, keep)[::-1]
        if len(released):
            state.unreserve(row)
            columns.cover[row] = keep * size
            context.session.deferred.release(released, context.last_launched)


def _fill(state: PoolState, rows: I64, first: I64, end: I64, now: float) -> None:
    """Blocks `first` to `end - 1` of each row are full of committed tokens."""
    hashed = state.rows.hashed[rows]
    for index in (hashed > first).nonzero()[0].tolist():
        _fill_prompt(state, int(rows[index]), int(first[index]), int(min(end[index], hashed[index])), now)
    # A sequence that fills several blocks behind its hashed ones chains them one round after the other.
    while len(behind := (end > hashed).nonzero()[0]):
        if len(behind) < len(rows):
            rows, hashed, end = rows[behind], hashed[behind], end[behind]
        _fill_next(state, rows, hashed)
        hashed = hashed + _ONE


def _fill_prompt(state: PoolState, row: int, first: int, end: int, now: float) -> None:
    """Blocks whose digests are known since the admission."""
    columns = state.rows
    sequence, base = columns.record(row), int(columns.base[row])
    sequence.progress_seconds = now
    ids = columns.extents.tables[base + first : base + end].astype(np.int64)
    previous = np.zeros(len(ids), np.int64)
    previous[1:] = ids[:-1]
    if first:
        previous[0] = columns.extents.tables[base + first - 1]
    state.sealing.fill(
        ids,
        previous,
        sequence.chain.digests(first, end),
        sequence.chain.parents(first, end),
        np.arange(first, end, dtype=np.uint32),
        np.full(len(ids), sequence.namespace_id, np.uint32),
        ((sequence, end),),
    )


def _fill_next(state: PoolState, rows: I64, blocks: I64) -> None:
    """One block of each row, behind its last hashed one: what steady decode fills."""
    columns = state.rows
    entries = columns.base[rows] + blocks
    parents = columns.tail[rows]
    contents = columns.extents.token_blocks[entries].view(np.uint8)
    each = extend_each(parents, contents, state.config.block_tokens)
    for index in (columns.keyed[rows] > blocks).nonzero()[0].tolist():
        # The tail of a prompt that ends in content besides tokens.
        keys = columns.record(int(rows[index])).extra_keys.get(int(blocks[index]), ())
        each[index] = block_digest(Digest(parents[index].tobytes()), contents[index].tobytes(), keys)
    digests = b"".join(each)
    columns.tail[rows] = np.frombuffer(digests, np.uint8).reshape(parents.shape)
    columns.hashed[rows] = blocks + _ONE
    tables = columns.extents.tables
    # Entry 0 of a table has no predecessor: the null block stands for the root.
    previous = np.where(blocks > _ZERO, tables[entries - _ONE], _NULL).astype(np.int64)
    state.sealing.fill(
        tables[entries].astype(np.int64),
        previous,
        digests,
        parents.tobytes(),
        blocks.astype(np.uint32),
        columns.namespace[rows],
    )


def _expire(state: PoolState, context: StepContext, row: int, length: int) -> None:
    """Release the blocks that left the sliding window, deepest first, and report nulls in their place."""
    columns = state.rows
    first, end = int(columns.first_real[row]), state.rules.first_needed(length)
    end = min(end, int(columns.cover[row]) // state.config.block_tokens)
    if end <= first:
        return
    base = int(columns.base[row])
    expired = columns.extents.tables[base + first : base + end][::-1].astype(np.int64)
    columns.extents.tables[base + first : base + end] = 0
    columns.first_real[row] = end
    context.session.deferred.release(expired, context.last_launched)
    context.put_many(
        state, np.array([row]), np.array([first]), np.array([end - first]), np.zeros(end - first, np.int64)
    )


def rechain(state: PoolState, row: int, tokens: bytes) -> None:
    """Bring a sequence's chain up to its tokens and its namespace's current version."""
    sequence = state.rows.record(row)
    root = state.namespaces.root(sequence.namespace_id)
    chain = sequence.chain if sequence.chain.root == root else chains.Chain(root)
    sequence.chain = chains.extend(chain, tokens, state.config.block_tokens, sequence.extra_keys)
