"""A step of a session: decode, apply, encode; or refuse it, and say why (I6, I7)."""

from collections.abc import Mapping
from itertools import groupby
from time import perf_counter

import structlog

from kvplane.cache.core import CacheCore, Chain, Step, StepResult
from kvplane.cache.service.decode import Surroundings, decode_advance, decode_step, has_more, wire_fields
from kvplane.cache.service.encode import encode_preemption, encode_result
from kvplane.cache.service.grants import grant_of
from kvplane.cache.service.pools import HostedPool
from kvplane.cache.service.sessions import EngineSession
from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire import features
from kvplane.wire.errors import (
    InvalidArgumentError,
    KvplaneError,
    NotFoundError,
    PoolLostError,
    SessionExpiredError,
    UnsupportedFeatureError,
)
from kvplane.wire.status import to_status

_log = structlog.get_logger(__name__)

_MALFORMED = (InvalidArgumentError, NotFoundError, UnsupportedFeatureError)
"""Errors of the step itself: its id is spent, and steps behind it are rejected too."""


def apply_step(
    pool: HostedPool, session: EngineSession, request: cache_pb2.StepRequest, chains: Mapping[int, Chain]
) -> cache_pb2.StepResponse:
    """Apply a step, or say why not. Raises only what ends the stream: the session or the pool is gone."""
    message = request.step
    stored = session.answers.get(message.step_id)
    if stored is not None:
        return stored
    core, seals, now = pool.core, pool.seals, pool.clock()
    if core is None or seals is None:
        raise PoolLostError(f"pool {pool.pool_id} has no bytes any more")
    started = perf_counter()
    try:
        if request.required_features:
            features.require(request.required_features)
        step = _decode(pool, session, message, chains)
        decoded = perf_counter()
        result = core.step(session.session_id, step, now)
    except SessionExpiredError:
        raise
    except KvplaneError as error:
        return _rejected(pool, core, session, message, error)
    applied = perf_counter()
    session.note_applied(message)
    if result.states or session.stalled:
        session.note_stalls(result, now)
    if result.preemptions:
        _revoke(pool, session, result)
    if seals.idle:
        session.published_step = message.step_id
    response = session.respond()
    encode_result(response.result, result, session.session_id, session.published_step)
    if session.mode == types_pb2.SESSION_MODE_REMOTE:
        grant_of(pool, session, response.result, message)
    session.answers[message.step_id] = response
    encoded = perf_counter()
    seconds = pool.metrics.step_seconds
    seconds.observe("decode", decoded - started)
    seconds.observe("core", applied - decoded)
    seconds.observe("encode", encoded - applied)
    seals.pump_soon(now)
    return response


def _decode(pool: HostedPool, session: EngineSession, message: step_pb2.Step, chains: Mapping[int, Chain]) -> Step:
    completed = session.completed_step(message.completed_steps)
    packed = message.acknowledged_revocations
    if not packed and not has_more(message):
        return decode_advance(message, completed)
    around = Surroundings(
        pool.template.model.block_tokens,
        session.namespace_id,
        completed,
        session.drained_sequences(packed) if packed else (),
        chains,
    )
    return decode_step(message, around)


def _rejected(
    pool: HostedPool, core: CacheCore, session: EngineSession, message: step_pb2.Step, error: KvplaneError
) -> cache_pb2.StepResponse:
    """The answer to a refused step. Its id is spent unless it was not the next one."""
    ledger = session.core.ledger
    if ledger.newest_step < message.step_id and isinstance(error, _MALFORMED):
        try:
            error = core.reject(session.session_id, message.step_id, message.last_seen_step, error, pool.clock())
        except KvplaneError as refused:
            error = refused
    if isinstance(error, InvalidArgumentError) and not any(
        violation.field.startswith("step.") for violation in error.violations
    ):
        error = wire_fields(error)
    response = session.respond()
    response.rejected.CopyFrom(step_pb2.RejectedStep(step_id=message.step_id, status=to_status(error)))
    if message.step_id and ledger.newest_step == message.step_id:
        session.confirm(message.last_seen_step, message.last_seen_notice)
        session.answers[message.step_id] = response
    pool.metrics.rejected_steps.labels(error.reason).inc()
    _log.warning(
        "step rejected", session=session.session_id, step=message.step_id, reason=error.reason, message=error.message
    )
    return response


def _revoke(pool: HostedPool, session: EngineSession, result: StepResult) -> None:
    """Victims of other sessions get a notice on their own stream."""
    for preemption in result.preemptions:
        pool.metrics.preempted(preemption)
    others = [each for each in result.preemptions if each.session_id != session.session_id]
    others.sort(key=lambda each: each.session_id)
    for session_id, victims in groupby(others, key=lambda each: each.session_id):
        if session_id in pool.sessions:
            told = [encode_preemption(each, with_beneficiary=False) for each in victims]
            pool.sessions[session_id].revoke(told)
