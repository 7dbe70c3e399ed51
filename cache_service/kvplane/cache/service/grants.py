"""Grants: a remote session's table deltas, signed for the shards (the engine carries them and cannot change them)."""

from typing import TYPE_CHECKING

import numpy as np

from kvplane.cache.service.sessions import EngineSession
from kvplane.v1 import step_pb2
from kvplane.wire.grants import sign
from kvplane.wire.packed import pack_u32, pack_u64, unpack_u32, unpack_u64

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
    session.grant_number += 1
    body = step_pb2.GrantBody(
        pool_id=pool.pool_id,
        pool_epoch=pool.pool_epoch,
        incarnation=pool.incarnation,
        boot_ids=pack_u64([pool.links[rank].boot_id for rank in sorted(pool.links)]),
        session_id=session.session_id,
        lease_epoch=session.lease_epoch,
        number=session.grant_number,
        step_id=result.step_id,
        table_deltas=result.table_deltas,
        released_sequence_ids=released.tobytes(),
        truncated_sequence_ids=pack_u64(truncated),
        truncated_tokens=pack_u32(tokens),
        copies=result.transfers,
    )
    result.grant.CopyFrom(sign(pool.grant_key, body))
    del result.table_deltas[:]


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
