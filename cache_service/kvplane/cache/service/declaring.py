"""Declarations: what an engine says that it holds after a restart of the control plane, and what that comes to."""

from collections.abc import Mapping

import numpy as np
import structlog

from kvplane.cache.core import Chain, Cut, Declaration, Declared
from kvplane.cache.service.decode import Surroundings, decode_sequence
from kvplane.cache.service.grants import reset_grant
from kvplane.cache.service.pools import HostedPool
from kvplane.cache.service.sessions import EngineSession
from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import InvalidArgumentError, PreconditionError
from kvplane.wire.features import refuse
from kvplane.wire.packed import U32Array, U64Array, pack_u32, pack_u64, unpack_u32, unpack_u64

_log = structlog.get_logger(__name__)

MOST_DEFERRED = 16
"""How often a declaration may name every block as released, on average: many released sequences share a prefix."""

_RUNS = (step_pb2.SEQUENCE_STATE_RUNNING, step_pb2.SEQUENCE_STATE_STALLED)
_WAITS = (step_pb2.SEQUENCE_STATE_WAITING, step_pb2.SEQUENCE_STATE_PREEMPTED)


def take_declaration(
    pool: HostedPool, session: EngineSession, message: cache_pb2.Declaration, chains: Mapping[int, Chain]
) -> cache_pb2.StepResponse | None:
    """Take a part of a declaration; the answer to the last one. Raises what ends the stream, and changes nothing then.

    One that comes again before the first step gets its stored answer.
    """
    if session.declared:
        if session.declaration_answer is None:
            raise PreconditionError("no declaration is awaited", reason="DECLARATION_NOT_AWAITED")
        return session.declaration_answer if message.last else None
    parts = session.declaration
    first = len(parts.sequences)
    if first + len(message.sequences) > session.core.max_sequences:
        raise InvalidArgumentError.of("declaration.sequences", f"are more than {session.core.max_sequences}")
    for index, each in enumerate(message.sequences):
        parts.sequences.append(_declared(pool, session, each, f"declaration.sequences[{first + index}]", chains))
    for deferred in message.deferred:
        where = f"declaration.deferred[{len(parts.deferred)}]"
        ids, generations = _blocks(deferred.blocks, f"{where}.blocks")
        if len(ids) and int(ids.max()) >= pool.num_blocks:
            raise InvalidArgumentError.of(f"{where}.blocks.block_ids", f"must be below {pool.num_blocks}")
        if session.mode == types_pb2.SESSION_MODE_REMOTE:
            # A shard ends the plans of a table that it drops, and lets nobody run on what it has not granted.
            granted = np.zeros(len(ids), np.bool_)
            if pool.recovery is not None:
                granted = pool.recovery.granted_any(session.session_id, ids, generations)
            ids, generations = ids[granted], generations[granted]
        parts.num_deferred += len(ids)
        if parts.num_deferred > MOST_DEFERRED * pool.num_blocks:
            raise InvalidArgumentError.of("declaration.deferred", "names more blocks than can be")
        parts.deferred.append((deferred.step_id, ids.astype(np.int64), generations))
    if not message.last:
        return None
    return _whole(pool, session, message)


def _whole(pool: HostedPool, session: EngineSession, message: cache_pb2.Declaration) -> cache_pb2.StepResponse:
    """All parts are there: let the core judge them."""
    core, now = pool.core, pool.clock()
    assert core is not None
    completed = unpack_u64("declaration.completed_steps", message.completed_steps, session.num_ranks)
    declaration = Declaration(
        tuple(session.declaration.sequences),
        tuple(session.declaration.deferred),
        message.last_sent_step,
        int(completed.min()),
    )
    cuts = core.adopt(session.session_id, declaration, now)
    session.declared_steps(completed.tolist())
    response = session.respond()
    _answer(response.declared, cuts)
    if session.mode == types_pb2.SESSION_MODE_REMOTE:
        response.declared.grant.CopyFrom(reset_grant(pool, session))
    session.declaration_answer = response
    _log.info("declared", session=session.session_id, sequences=len(declaration.sequences), cut=len(cuts))
    if pool.recovery is not None:
        pool.recovery.declared(session.session_id)
        pool.recovery.check()
    if pool.seals is not None:
        pool.seals.pump_soon(now)
    return response


def _declared(
    pool: HostedPool,
    session: EngineSession,
    message: cache_pb2.DeclaredSequence,
    where: str,
    chains: Mapping[int, Chain],
) -> Declared:
    around = Surroundings(pool.template.model.block_tokens, session.namespace_id, chains=chains)
    admit = decode_sequence(message.sequence, f"{where}.sequence", around)
    if message.group_committed:
        raise refuse("group_counts", f"{where}.group_committed")
    if message.state not in (*_RUNS, *_WAITS):
        raise refuse("state", f"{where}.state")
    if len(message.table) > 1:
        raise refuse("several segments and groups", f"{where}.table")
    ids, generations = _blocks(message.table[0] if message.table else types_pb2.BlockList(), f"{where}.table[0]")
    granted = None
    if session.mode == types_pb2.SESSION_MODE_REMOTE:
        granted = np.zeros(len(ids), np.bool_)
        if pool.recovery is not None:
            granted = pool.recovery.granted(session.session_id, admit.sequence_id, ids, generations)
    return Declared(
        admit,
        message.num_prompt_tokens,
        message.num_committed,
        ids.astype(np.int64),
        generations,
        message.state in _RUNS,
        message.state == step_pb2.SEQUENCE_STATE_PREEMPTED,
        granted,
    )


def _blocks(message: types_pb2.BlockList, where: str) -> tuple[U32Array, U64Array]:
    if message.group or message.segment:
        raise refuse("several segments and groups", where)
    ids = unpack_u32(f"{where}.block_ids", message.block_ids)
    return ids, unpack_u64(f"{where}.generations", message.generations, len(ids))


def _answer(message: cache_pb2.DeclarationResult, cuts: tuple[Cut, ...]) -> None:
    message.SetInParent()
    message.cut_sequence_ids = pack_u64([cut.sequence_id for cut in cuts])
    message.cut_tokens = pack_u32([cut.num_tokens for cut in cuts])
    # The core numbers reasons as the wire does.
    message.cut_reasons = pack_u32([int(cut.reason) for cut in cuts])
