"""The cache service without a transport: messages in, messages out, errors raised.

Nothing awaits in here, so every method is atomic on an event loop and needs no lock. What has to wait for shards
returns the `Broadcast` to wait for.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping

import structlog

from kvplane.cache.core import Chain
from kvplane.cache.service import identities, namespaces, opening
from kvplane.cache.service.bounds import check_limit, check_range
from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.declaring import take_declaration
from kvplane.cache.service.endings import end_session
from kvplane.cache.service.grants import reset_grant
from kvplane.cache.service.keys import KEY_BYTES, Keys
from kvplane.cache.service.lookups import lookup
from kvplane.cache.service.metrics import Metrics
from kvplane.cache.service.opening import Tenant
from kvplane.cache.service.pools import CallLater, HostedPool
from kvplane.cache.service.registrations import Registrations
from kvplane.cache.service.sessions import DeclarationParts, EngineSession, Push
from kvplane.cache.service.shards import Broadcast
from kvplane.cache.service.steps import apply_step
from kvplane.v1 import cache_pb2, registry_pb2, types_pb2
from kvplane.wire import features
from kvplane.wire.errors import (
    InvalidArgumentError,
    KvplaneError,
    NotFoundError,
    PermissionDeniedError,
    PoolLostError,
    PreconditionError,
    SessionExpiredError,
    StaleEpochError,
    UnavailableError,
)

_log = structlog.get_logger(__name__)

DEFAULT_TENANT = "default"


class ControlPlane:
    """All pools and sessions of one service. `clock` gives seconds; `call_later(seconds, call)` calls back."""

    def __init__(
        self, config: CacheConfig, clock: Callable[[], float], call_later: CallLater, keys: Keys | None = None
    ) -> None:
        self.config = config
        self.keys = keys or Keys(secrets.token_bytes(KEY_BYTES))
        self.clock = clock
        self.metrics = Metrics()
        self.pools: dict[str, HostedPool] = {}
        self.registrations = Registrations(self)
        self.draining = False
        self._call_later = call_later
        self._lost_sessions: dict[int, None] = {}
        secret = config.tenant_secret.read_bytes() if config.tenant_secret else None
        self._tenant_secret = secret

    def new_pool(self, template: registry_pb2.RegisterRequest) -> HostedPool:
        """A pool whose first shard has registered."""
        if template.pool_id not in self.pools:
            check_limit("pools", len(self.pools), self.config.max_pools)
        pool = HostedPool(
            template,
            self.config,
            self.metrics,
            self.keys.grant_key(template.pool_id),
            self._call_later,
            self.clock,
            self.note_lost,
        )
        self.pools[template.pool_id] = pool
        return pool

    def tick(self) -> None:
        """End what has run out: leases, and shards that were silent too long."""
        now = self.clock()
        for pool in self.pools.values():
            for session_id in pool.core.expired(now) if pool.core is not None else ():
                self.metrics.lease_expiries.inc()
                _log.warning("lease expired", session=session_id, pool=pool.pool_id)
                end_session(pool, pool.sessions[session_id], _expired(session_id))
            pool.tick()
        self.registrations.tick(now)
        self.metrics.refresh(self.pools.values(), now)

    # Sessions

    def open_session(
        self, request: cache_pb2.OpenSessionRequest, tenant_id: str
    ) -> tuple[cache_pb2.OpenSessionResponse, Broadcast]:
        """Take or resume a lease; the answer counts once all shards know the session (and its lease epoch)."""
        features.require(request.required_features)
        if request.resume_token:
            lease = self.keys.lease(request.resume_token)
            if lease.tenant_id != tenant_id or lease.pool_id != request.pool_id:
                raise PermissionDeniedError("the resume token is another tenant's, or for another pool")
            if lease.session_id in self._lost_sessions:
                raise PoolLostError(f"session {lease.session_id}: its pool's bytes are gone")
            if lease.pool_id not in self.pools:
                raise opening.reconciling(lease.pool_id)
            pool = self.pools[lease.pool_id]
            session = opening.resume(pool, lease, self.keys)
        else:
            pool = self._pool(request.pool_id)
            core = pool.open_core()
            if self.draining:
                raise _draining()
            check_limit("sessions", sum(len(each.sessions) for each in self.pools.values()), self.config.max_sessions)
            salt = self._salt(tenant_id)
            session = opening.open_session(pool, core, request, Tenant(tenant_id, salt), self.config, self.keys)
        return opening.response(pool, session, self.config), opening.serve(pool, session)

    def heartbeat(self, request: cache_pb2.HeartbeatRequest) -> cache_pb2.HeartbeatResponse:
        """Renew a lease."""
        pool, session = self.session(request.session_id, request.lease_epoch)
        assert pool.core is not None
        pool.core.renew(session.session_id, self.clock())
        return cache_pb2.HeartbeatResponse(
            ttl_ms=round(session.core.ttl_seconds * 1000), pool_state=pool.state, incarnation=pool.incarnation
        )

    def close_session(self, request: cache_pb2.CloseSessionRequest) -> cache_pb2.CloseSessionResponse:
        """End a lease; closing one that is gone succeeds. An attached engine whose lease ran out can still say here
        that its device work is over."""
        for pool in self.pools.values():
            session = pool.sessions.get(request.session_id)
            if session is not None:
                session.check_epoch(request.lease_epoch)
                _log.info("session closed", session=session.session_id, pool=pool.pool_id)
                end_session(pool, session, _expired(session.session_id), drained=request.drained)
                coming = session.core.deferred.coming if session.session_id in pool.sessions else 0
                return cache_pb2.CloseSessionResponse(quarantined_blocks=coming)
            known = pool.recovery.known.get(request.session_id) if pool.recovery is not None else None
            if known is not None and pool.core is not None and pool.recovery is not None:
                if request.lease_epoch != known.lease_epoch:
                    raise StaleEpochError(f"lease epoch {request.lease_epoch} was replaced by {known.lease_epoch}")
                pool.recovery.end(request.session_id, drained=request.drained)
        return cache_pb2.CloseSessionResponse()

    def register_namespace(
        self, request: cache_pb2.RegisterNamespaceRequest
    ) -> tuple[cache_pb2.RegisterNamespaceResponse, Broadcast]:
        """Name a namespace; the answer counts once all shards have stored it."""
        pool, session = self.session(request.session_id, request.lease_epoch)
        if request.on_behalf_of_tenant:
            raise features.refuse("on_behalf_of", "on_behalf_of_tenant")
        core = pool.open_core()
        core.renew(session.session_id, self.clock())
        namespace = identities.namespace(request.namespace, self._salt(session.tenant_id), "namespace")
        namespace_id = namespaces.register(core, namespace, self.config.max_namespaces)
        response = cache_pb2.RegisterNamespaceResponse(
            namespace_id=namespace_id + 1,
            root_digest=core.state.namespaces.root(namespace_id),
            version=core.state.namespaces.version(namespace_id),
        )
        return response, namespaces.put(pool, namespace_id, session.tenant_id)

    def lookup(self, request: cache_pb2.LookupRequest, hashed: Chain | None = None) -> cache_pb2.LookupResponse:
        """How much of a prompt is published. `hashed` is what was hashed of it ahead."""
        pool, session = self.session(request.session_id, request.lease_epoch)
        if request.HasField("pin"):
            raise features.refuse("pin", "pin")
        return lookup(pool, session, request, hashed, self.config.max_prompt_tokens)

    # Steps

    def open_stream(
        self,
        request: cache_pb2.StepRequest,
        push: Push,
        close: Callable[[KvplaneError], None],
    ) -> tuple[HostedPool, EngineSession, list[cache_pb2.StepResponse]]:
        """Bind a stream to its session; returns what to send first: `opened`, then what the engine has not seen."""
        features.require(request.required_features)
        if request.WhichOneof("message") != "open":
            raise InvalidArgumentError.of("open", "must be the first message of a stream")
        opening = request.open
        pool, session = self.session(opening.session_id, opening.lease_epoch)
        if opening.stream_epoch != session.stream_epoch:
            raise StaleEpochError(
                f"stream epoch {opening.stream_epoch} was replaced by {session.stream_epoch}",
                metadata={"stream_epoch": str(session.stream_epoch)},
            )
        assert pool.core is not None
        pool.core.renew(session.session_id, self.clock())
        if session.close_stream is not None:
            session.close_stream(StaleEpochError(f"session {session.session_id} has a newer stream"))
        session.push, session.close_stream = push, close
        session.confirm(opening.last_seen_step, opening.last_seen_notice)
        opened = session.respond()
        opened.opened.last_applied_step = session.core.ledger.newest_step
        opened.opened.declaration_required = not session.declared
        session.declaration = DeclarationParts()
        again = []
        if session.declaration_answer is not None:
            again.append(session.declaration_answer)
        elif session.needs_reset_grant:
            opened.opened.grant.CopyFrom(reset_grant(pool, session))
        again += [answer for _, answer in sorted(session.answers.items())]
        again += [notice for _, notice in sorted(session.notices.items())]
        return pool, session, [opened, *again]

    def step(
        self, pool: HostedPool, session: EngineSession, request: cache_pb2.StepRequest, chains: Mapping[int, Chain]
    ) -> cache_pb2.StepResponse | None:
        """Answer one message of a bound stream; None for a part of a declaration. Raises what ends the stream."""
        kind = request.WhichOneof("message")
        if kind == "step":
            if not session.declared:
                raise PreconditionError("the stream begins with a declaration", reason="DECLARATION_REQUIRED")
            return apply_step(pool, session, request, chains)
        features.require(request.required_features)
        if kind == "declaration":
            return take_declaration(pool, session, request.declaration, chains)
        raise InvalidArgumentError.of("message", "is neither a step nor a declaration")

    def session(self, session_id: int, lease_epoch: int) -> tuple[HostedPool, EngineSession]:
        """A live session. Raises `SessionExpiredError`, `PoolLostError`, `StaleEpochError`."""
        for pool in self.pools.values():
            session = pool.sessions.get(session_id)
            if session is not None and not session.core.ended and session.core.expires_at > self.clock():
                session.check_epoch(lease_epoch)
                return pool, session
        if session_id in self._lost_sessions:
            raise PoolLostError(f"session {session_id}: its pool's bytes are gone")
        for pool in self.pools.values():
            if pool.recovery is not None and session_id in pool.recovery.known:
                raise StaleEpochError(f"the control plane was restarted: resume session {session_id} with its token")
        raise _expired(session_id)

    def note_lost(self, sessions: list[int]) -> None:
        """Remember sessions whose pool was lost, so that their engines are told why; the newest few thousand."""
        self._lost_sessions.update(dict.fromkeys(sessions))
        while len(self._lost_sessions) > 4096:
            del self._lost_sessions[next(iter(self._lost_sessions))]

    # Pools

    def get_pool(self, request: cache_pb2.GetPoolRequest) -> cache_pb2.GetPoolResponse:
        """One pool."""
        return cache_pb2.GetPoolResponse(pool=self._pool(request.pool_id).describe())

    def list_pools(self, request: cache_pb2.ListPoolsRequest) -> cache_pb2.ListPoolsResponse:
        """A page of pools, by name; the token of a page is the last name of the one before."""
        size = request.page_size or 100
        check_range("page_size", size, 1, 1000)
        names = sorted(name for name in self.pools if name > request.page_token)
        page = [self.pools[name].describe() for name in names[:size]]
        more = names[size - 1] if len(names) > size else ""
        return cache_pb2.ListPoolsResponse(pools=page, next_page_token=more)

    @property
    def ready(self) -> bool:
        """Whether there is an open pool."""
        return not self.draining and any(pool.state == types_pb2.POOL_STATE_READY for pool in self.pools.values())

    def drain(self, deadline_seconds: float) -> None:
        """No new sessions; every engine is told."""
        self.draining = True
        for pool in self.pools.values():
            for session in pool.sessions.values():
                notice = cache_pb2.DrainingNotice(deadline_ms=round(1000 * deadline_seconds))
                session.notify(cache_pb2.Notice(draining=notice))

    def _pool(self, pool_id: str) -> HostedPool:
        pool = self.pools.get(pool_id)
        if pool is None:
            raise NotFoundError(f"pool {pool_id[:80]!r} does not exist", reason="POOL_NOT_FOUND")
        return pool

    def _salt(self, tenant_id: str) -> bytes:
        """A tenant's salt: derived with the configured secret, never taken from a request. Without a secret there is
        one tenant and nothing to keep apart."""
        if self._tenant_secret is None:
            return b""
        return hmac.digest(self._tenant_secret, b"kvplane tenant salt\0" + tenant_id.encode(), hashlib.sha256)


def _expired(session_id: int) -> SessionExpiredError:
    return SessionExpiredError(f"session {session_id} is gone, or its lease is over")


def _draining() -> KvplaneError:
    return UnavailableError("the cache service is draining", reason="DRAINING", retry_after_seconds=1.0)
