"""How sessions begin and resume, and what shards are told about them."""

import hashlib
import secrets
from dataclasses import dataclass

import structlog

from kvplane.cache.core import CacheCore
from kvplane.cache.service import identities, namespaces
from kvplane.cache.service.bounds import check_range
from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.keys import Keys, Lease
from kvplane.cache.service.pools import HostedPool
from kvplane.cache.service.sessions import EngineSession
from kvplane.cache.service.shards import Broadcast
from kvplane.v1 import cache_pb2, registry_pb2, types_pb2
from kvplane.wire import features, limits
from kvplane.wire.errors import (
    InvalidArgumentError,
    PoolLostError,
    SessionExpiredError,
    StaleEpochError,
    UnavailableError,
)

_log = structlog.get_logger(__name__)


RECOVERY_RETRY_SECONDS = 0.1
"""When asking a pool that reads what its shards hold makes sense again."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who opens a session."""

    tenant_id: str
    salt: bytes
    """Part of all its namespaces; derived by the server."""


def open_session(
    pool: HostedPool,
    core: CacheCore,
    request: cache_pb2.OpenSessionRequest,
    tenant: Tenant,
    config: CacheConfig,
    keys: Keys,
) -> EngineSession:
    """A new session. Raises `IdentityMismatchError`, `InvalidArgumentError`, `LimitExceededError`, and has changed
    nothing then."""
    identities.require_same("model", pool.template.model, request.model)
    if request.HasField("layout"):
        identities.require_same("layout", pool.template.layout, request.layout)
    identities.check_name(request.engine_name, "engine_name")
    if request.mode not in (types_pb2.SESSION_MODE_ATTACHED, types_pb2.SESSION_MODE_REMOTE):
        raise InvalidArgumentError.of("mode", "is neither ATTACHED nor REMOTE")
    ttl_ms = request.ttl_ms if request.HasField("ttl_ms") else limits.TTL_MS_DEFAULT
    ranks = request.num_ranks if request.HasField("num_ranks") else 1
    rows = request.max_sequences if request.HasField("max_sequences") else 1024
    check_range("ttl_ms", ttl_ms, limits.TTL_MS_MIN, limits.TTL_MS_MAX)
    check_range("num_ranks", ranks, 1, limits.SESSION_RANKS)
    check_range("max_sequences", rows, 1, 1 << 20)
    namespace = identities.namespace(request.default_namespace, tenant.salt, "default_namespace")
    namespace_id = namespaces.register(core, namespace, config.max_namespaces)
    # 62 random bits, never 0: unique over restarts without a journal.
    lease = Lease(
        pool_id=pool.pool_id,
        pool_epoch=pool.pool_epoch,
        session_id=secrets.randbits(62) | 1,
        mode=request.mode,
        ttl_ms=ttl_ms,
        num_ranks=ranks,
        max_sequences=min(rows, config.max_sequences),
        namespace_id=namespace_id,
        tenant_id=tenant.tenant_id,
        engine_name=request.engine_name,
    )
    session = _session(pool, core, lease, keys)
    session_id = session.session_id
    namespaces.put(pool, namespace_id, tenant.tenant_id)
    _log.info("session opened", session=session_id, pool=pool.pool_id, engine=request.engine_name)
    return session


def resume(pool: HostedPool, lease: Lease, keys: Keys) -> EngineSession:
    """The session of a resume token, under a new lease epoch; its old stream ends. After a restart of the control plane
    it is opened again, and has to say what it holds. Raises `SessionExpiredError`, `PoolLostError`, and
    `UnavailableError` while it is not known yet what the shards hold."""
    core, now = pool.core, pool.clock()
    if core is None:
        raise reconciling(pool.pool_id)
    if lease.pool_epoch != pool.pool_epoch:
        raise PoolLostError(f"epoch {lease.pool_epoch} of pool {pool.pool_id} is over, and its bytes are gone")
    session = pool.sessions.get(lease.session_id)
    if session is not None and not session.core.ended and session.core.expires_at > now:
        core.renew(session.session_id, now)
        session.lease_epoch += 1
        if session.close_stream is not None:
            session.close_stream(StaleEpochError(f"session {session.session_id} was resumed elsewhere"))
            session.push = session.close_stream = None
        _log.info("session resumed", session=session.session_id, lease_epoch=session.lease_epoch)
        return session
    known = pool.recovery.known.get(lease.session_id) if pool.recovery is not None else None
    if session is not None or known is None or known.gone or known.mode != lease.mode or pool.recovery is None:
        raise SessionExpiredError("the resume token's session is gone")
    pool.recovery.reopened(lease.session_id, lease.ttl_ms / 1000)
    session = _session(pool, core, lease, keys)
    session.lease_epoch, session.grant_number = known.lease_epoch + 1, known.last_grant
    session.processes, session.declared = known.processes, False
    _log.info("session opened again", session=session.session_id, lease_epoch=session.lease_epoch)
    return session


def reconciling(pool_id: str) -> UnavailableError:
    """Why a session cannot be resumed yet."""
    return UnavailableError(
        f"pool {pool_id} waits for its shards", reason="RECONCILING", retry_after_seconds=RECOVERY_RETRY_SECONDS
    )


def _session(pool: HostedPool, core: CacheCore, lease: Lease, keys: Keys) -> EngineSession:
    session = EngineSession(
        core=core.open_session(pool.clock(), lease.max_sequences, lease.ttl_ms / 1000, lease.session_id),
        pool_id=pool.pool_id,
        mode=types_pb2.SessionMode.ValueType(lease.mode),
        num_ranks=lease.num_ranks,
        engine_name=lease.engine_name,
        tenant_id=lease.tenant_id,
        namespace_id=lease.namespace_id,
        resume_token=keys.token(lease),
        secret=keys.session_secret(lease.session_id),
        # Rises with every start of the control plane.
        stream_epoch=pool.incarnation,
    )
    pool.sessions[session.session_id] = session
    return session


def serve(pool: HostedPool, session: EngineSession) -> Broadcast:
    """Have every shard know the session, its lease epoch and the hash of its secret."""
    served = registry_pb2.ServedSession(
        session_id=session.session_id,
        lease_epoch=session.lease_epoch,
        tenant_id=session.tenant_id,
        ttl_ms=round(session.core.ttl_seconds * 1000),
        mode=session.mode,
        max_sequences=session.core.max_sequences,
    )
    command = registry_pb2.ServeSession(session=served, secret_sha256=hashlib.sha256(session.secret).digest())
    return Broadcast(pool.links.values(), registry_pb2.ControlResponse(serve_session=command))


def response(pool: HostedPool, session: EngineSession, config: CacheConfig) -> cache_pb2.OpenSessionResponse:
    """The answer to an engine that opened or resumed a session."""
    return cache_pb2.OpenSessionResponse(
        session_id=session.session_id,
        lease_epoch=session.lease_epoch,
        stream_epoch=session.stream_epoch,
        ttl_ms=round(session.core.ttl_seconds * 1000),
        resume_token=session.resume_token,
        session_secret=session.secret,
        pool=pool.describe(),
        max_sequences=session.core.max_sequences,
        default_namespace_id=session.namespace_id + 1,
        last_applied_step=session.core.ledger.newest_step,
        declaration_required=not session.declared,
        limits=cache_pb2.Limits(
            message_bytes=limits.MESSAGE_BYTES,
            unanswered_steps=limits.UNANSWERED_STEPS,
            prompt_tokens=config.max_prompt_tokens,
            new_blocks_per_step=limits.NEW_BLOCKS_PER_STEP,
            step_sequences=limits.STEP_SEQUENCES,
            sessions=config.max_sessions,
        ),
        features=sorted(features.BUILT),
    )
