"""Grants: a remote session's table deltas, signed for the shards (the engine carries them and cannot change them)."""

from typing import TYPE_CHECKING

import numpy as np

from kvplane.cache.core.sequences import Status
from kvplane.cache.service.sessions import EngineSession
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.grants import sign
from kvplane.wire.packed import U64Array, pack_u32, pack_u64, unpack_u32, unpack_u64

if TYPE_CHECKING:
    from kvplane.cache.service.pools import HostedPool

_GONE = (step_pb2.SEQUENCE_STATE_FINISHED, step_pb2.SEQUENCE_STATE_PREEMPTED)


def grant_of(pool: "HostedPool", session: EngineSession, result: step_pb2.StepResult, step: step_pb2.Step) -> None:
    """Move a result's table deltas into a signed grant, numbered in its session. No deltas, no grant."""
    changes = result.state_changes
    states = unpack_u32("states", changes.states)
    released = unpack_u64("sequence_ids", changes.sequence_ids)[np.isin(states, _GONE)]
    truncated, tokens = _truncated(pool, session, step)
    if not (result.table_deltas or len(released) or truncated):
        return
    body = _next_body(pool, session)
    body.step_id = result.step_id
    # A shard releases before it grants. What a step gave and took again is not granted at all.
    body.table_deltas.extend(_without(delta, released) for delta in result.table_deltas)
    body.released_sequence_ids = released.tobytes()
    body.truncated_sequence_ids, body.truncated_tokens = pack_u64(truncated), pack_u32(tokens)
    body.copies.extend(result.transfers)
    result.grant.CopyFrom(sign(pool.grant_key, body))
    del result.table_deltas[:]


def _without(delta: types_pb2.TableDelta, released: U64Array) -> types_pb2.TableDelta:
    """A delta without the entries of sequences that are released."""
    sequence_ids = unpack_u64("sequence_ids", delta.sequence_ids)
    kept = ~np.isin(sequence_ids, released)
    if kept.all():
        return delta
    starts, counts = unpack_u32("starts", delta.starts), unpack_u32("counts", delta.counts)
    entries = np.repeat(kept, counts)
    blocks = delta.blocks
    return types_pb2.TableDelta(
        sequence_ids=sequence_ids[kept].tobytes(),
        starts=starts[kept].tobytes(),
        counts=counts[kept].tobytes(),
        blocks=types_pb2.BlockList(
            segment=blocks.segment,
            group=blocks.group,
            block_ids=unpack_u32("block_ids", blocks.block_ids)[entries].tobytes(),
            generations=unpack_u64("generations", blocks.generations)[entries].tobytes(),
        ),
    )


def reset_grant(pool: "HostedPool", session: EngineSession) -> step_pb2.Grant:
    """All tables of a session in one grant that replaces what its shards have: after a declaration, or under a new
    lease."""
    assert pool.core is not None
    rows, columns = pool.core.state.rows, pool.core.state.columns
    body = _next_body(pool, session)
    body.reset = True
    window = slice(session.core.first_row, session.core.first_row + session.core.max_sequences)
    running = np.flatnonzero(rows.status[window] == Status.RUNNING) + session.core.first_row
    tables = [rows.table(row) for row in running.tolist()]
    if tables:
        ids = np.concatenate(tables)
        body.table_deltas.add(
            sequence_ids=rows.ids[running].tobytes(),
            starts=bytes(4 * len(tables)),
            counts=pack_u32([len(table) for table in tables]),
            blocks=types_pb2.BlockList(
                block_ids=ids.astype(np.uint32).tobytes(), generations=columns.generation[ids].tobytes()
            ),
        )
    return sign(pool.grant_key, body)


def _next_body(pool: "HostedPool", session: EngineSession) -> step_pb2.GrantBody:
    session.grant_number += 1
    return step_pb2.GrantBody(
        pool_id=pool.pool_id,
        pool_epoch=pool.pool_epoch,
        incarnation=pool.incarnation,
        boot_ids=pack_u64([pool.links[rank].boot_id for rank in sorted(pool.links)]),
        session_id=session.session_id,
        lease_epoch=session.lease_epoch,
        number=session.grant_number,
    )


def _truncated(pool: "HostedPool", session: EngineSession, step: step_pb2.Step) -> tuple[list[int], list[int]]:
    """Sequences that the step rolled back and that still run, with the tokens that stay."""
    if not step.HasField("rollback") or pool.core is None:
        return [], []
    rows = pool.core.state.rows
    asked = dict(
        zip(
            unpack_u64("sequence_ids", step.rollback.sequence_ids).tolist(),
            unpack_u32("num_tokens", step.rollback.num_tokens).tolist(),
            strict=True,
        )
    )
    kept = {
        sequence_id: tokens
        for sequence_id, tokens in asked.items()
        if rows.ids[session.core.first_row + (sequence_id & 0xFFFF_FFFF)] == sequence_id
    }
    return list(kept), list(kept.values())
