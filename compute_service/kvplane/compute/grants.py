"""Grants: verified, applied in order, each whole or not at all."""

from collections.abc import Iterable

import numpy as np

from kvplane.compute.block_copies import copy_of
from kvplane.compute.copies import run_copies
from kvplane.compute.sessions import Session
from kvplane.compute.state import Holding, ShardState
from kvplane.compute.tables import ROW_MASK, StagedTables, Table
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire import features
from kvplane.wire import grants as wire_grants
from kvplane.wire.errors import (
    InvalidArgumentError,
    NotGrantedError,
    StaleEpochError,
    UnavailableError,
)
from kvplane.wire.packed import unpack_u32, unpack_u64


def open_grant(state: ShardState, session: Session, grant: step_pb2.Grant) -> step_pb2.GrantBody:
    """Verify a grant. Raises `NotGrantedError` (forged, another pool or session), `StaleEpochError` (pool epoch,
    incarnation, boot, lease), `UnsupportedFeatureError`, `UnavailableError` before the first registration."""
    if state.grant_key is None or state.holding is None:
        raise UnavailableError("this shard has no grant key before it is registered", retry_after_seconds=0.5)
    body = wire_grants.verify(state.grant_key, grant)
    features.require(body.required_features)
    identity = state.identity
    if body.pool_id != identity.pool_id or body.session_id != session.session_id:
        raise NotGrantedError(
            f"grant {body.number} is for session {body.session_id} on pool {body.pool_id!r}",
            metadata={"session_id": str(body.session_id), "pool_id": body.pool_id},
        )
    boots = unpack_u64("grant.boot_ids", body.boot_ids)
    rank = identity.spec.rank
    if rank >= len(boots) or int(boots[rank]) != identity.boot_id:
        raise StaleEpochError("the grant is for another start of this shard", metadata={"epoch": "boot_id"})
    for name, given, ours in (
        ("pool_epoch", body.pool_epoch, state.holding.pool.pool_epoch),
        ("lease_epoch", body.lease_epoch, session.lease_epoch),
    ):
        if given != ours:
            raise StaleEpochError(f"grant {body.number} has {name} {given}, not {ours}", metadata={"epoch": name})
    if body.incarnation < state.incarnation:
        raise StaleEpochError(
            f"grant {body.number} has incarnation {body.incarnation}, this shard follows {state.incarnation}",
            metadata={"epoch": "incarnation"},
        )
    return body


def apply_grants(state: ShardState, session: Session, grants: Iterable[step_pb2.Grant]) -> int:
    """Apply step grants in order and return the newest number. One that was applied already changes nothing. Raises
    what `open_grant` raises, `NotGrantedError` for a gap and `InvalidArgumentError`; grants before the bad one stay
    applied, the bad one changes nothing."""
    holding = state.held()
    for grant in grants:
        body = open_grant(state, session, grant)
        if body.number == 0:
            raise InvalidArgumentError.of("grants", "an export grant has no place among a step's grants")
        newer = (body.incarnation, body.lease_epoch) > session.reset_under
        if body.number <= session.last_grant and not (body.reset and (newer or session.needs_reset)):
            continue
        if session.needs_reset and not body.reset:
            raise NotGrantedError(
                f"the tables of session {session.session_id} were lost with this shard's last process",
                metadata={"needs": "reset"},
            )
        if not body.reset and body.number != session.last_grant + 1:
            raise NotGrantedError(
                f"grant {body.number} follows {session.last_grant}: the grants between are missing",
                metadata={"last_grant": str(session.last_grant)},
            )
        if body.incarnation > state.incarnation:
            state.raise_incarnation(body.incarnation)
        _apply(holding, session, body)
        holding.sessions.granted(session, body.number)
        if body.reset:
            session.needs_reset = False
            session.reset_under = (body.incarnation, body.lease_epoch)
    run_copies(holding, session)
    return session.last_grant


def _apply(holding: Holding, session: Session, body: step_pb2.GrantBody) -> None:
    size = holding.pool.layout.block_tokens
    staged = StagedTables(session.tables, reset=body.reset)
    cuts: list[tuple[Table, int]] = []
    truncated = unpack_u64("truncated_sequence_ids", body.truncated_sequence_ids)
    tokens = unpack_u32("truncated_tokens", body.truncated_tokens, len(truncated))
    for sequence_id, count in zip(truncated.tolist(), tokens.tolist(), strict=True):
        cuts.append((staged.truncate(sequence_id, -(-count // size)), count))
    children = unpack_u64("forked_sequence_ids", body.forked_sequence_ids)
    parents = unpack_u64("fork_parents", body.fork_parents, len(children))
    shared = unpack_u32("fork_tokens", body.fork_tokens, len(children))
    for child, parent, count in zip(children.tolist(), parents.tolist(), shared.tolist(), strict=True):
        staged.fork(_in_rows(session, child), parent, -(-count // size))
    released = unpack_u64("released_sequence_ids", body.released_sequence_ids).tolist()
    for delta in body.table_deltas:
        _put(staged, session, delta, holding.pool.num_blocks)
    # Behind what was granted: a sequence may be given slots and yield to another one in the same step.
    for sequence_id in released:
        staged.release(sequence_id)
    copies = [copy_of(transfer, size, holding.pool.num_blocks) for transfer in body.copies]
    # Everything is known to fit: from here on nothing raises.
    staged.commit()
    if body.reset:
        session.copies.clear()
    if body.reset or released:
        # Their blocks go to others; a plan that is left open must not keep those waiting.
        session.end_plans(holding.occupancy, None if body.reset else set(released))
    session.copies.extend(copies)
    for table, count in cuts:
        first = count // size
        ids = table.block_ids[first:].astype(np.int64)
        real = ids != 0
        ends = np.zeros(len(ids), np.int64)
        ends[:1] = count % size
        holding.occupancy.cut(ids[real], table.generations[first:][real], ends[real], session.session_id)


def _put(staged: StagedTables, session: Session, delta: types_pb2.TableDelta, num_blocks: int) -> None:
    sequences = unpack_u64("table_deltas.sequence_ids", delta.sequence_ids)
    starts = unpack_u32("table_deltas.starts", delta.starts, len(sequences))
    counts = unpack_u32("table_deltas.counts", delta.counts, len(sequences))
    if delta.blocks.segment or delta.blocks.group:
        raise features.refuse("several segments and groups", "table_deltas.blocks")
    ids = unpack_u32("table_deltas.blocks.block_ids", delta.blocks.block_ids, int(counts.sum()))
    generations = unpack_u64("table_deltas.blocks.generations", delta.blocks.generations, len(ids))
    if len(ids) and int(ids.max()) >= num_blocks:
        raise InvalidArgumentError.of("table_deltas.blocks.block_ids", f"{ids.max()} is not in 0..{num_blocks - 1}")
    end = 0
    for sequence_id, start, count in zip(sequences.tolist(), starts.tolist(), counts.tolist(), strict=True):
        first, end = end, end + count
        staged.put(_in_rows(session, sequence_id), start, ids[first:end], generations[first:end])


def _in_rows(session: Session, sequence_id: int) -> int:
    if sequence_id & ROW_MASK >= session.max_sequences:
        raise InvalidArgumentError.of(
            "sequence_ids", f"row {sequence_id & ROW_MASK} is not below the session's {session.max_sequences}"
        )
    return sequence_id
