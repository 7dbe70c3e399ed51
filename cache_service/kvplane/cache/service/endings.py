"""How sessions end: their leases at once, their blocks when nobody can touch them any more (I8, I9)."""

from typing import TYPE_CHECKING

import structlog

from kvplane.cache.service.sessions import EngineSession
from kvplane.cache.service.shards import Broadcast
from kvplane.v1 import registry_pb2, types_pb2
from kvplane.wire.errors import KvplaneError, SessionExpiredError

if TYPE_CHECKING:
    from kvplane.cache.service.pools import HostedPool

_log = structlog.get_logger(__name__)

FENCE_RETRY_SECONDS = 1.0
"""When a fence that a shard could not put up is tried again."""


def end_session(pool: "HostedPool", session: EngineSession, error: KvplaneError, *, drained: bool = False) -> None:
    """End a lease; its blocks are back once all shards have fenced it and its processes are gone, or at once when an
    attached engine says that its device work is over."""
    if pool.core is None:
        return
    if not session.core.ended:
        pool.core.end_session(session.session_id)
        if session.close_stream is not None:
            session.close_stream(error)
        if not drained or session.mode != types_pb2.SESSION_MODE_ATTACHED:
            _fence(pool, session)
    if drained and session.mode == types_pb2.SESSION_MODE_ATTACHED:
        _drained(pool, session)


def process_gone(pool: "HostedPool", session_id: int, process: tuple[int, int, int]) -> None:
    """A shard has seen a process of a session end. Without any left, the session is over at once."""
    session = pool.sessions.get(session_id)
    if session is None or process not in session.processes:
        return
    session.processes.discard(process)
    if not session.processes:
        _log.info("engine gone", session=session_id, pool=pool.pool_id)
        end_session(pool, session, SessionExpiredError("the engine's processes are gone"), drained=True)


def session_drained(pool: "HostedPool", rank: int, session_id: int, lease_epoch: int) -> None:
    """A shard says that nothing of a session runs or will run under its newest lease: what attached processes were
    waited for. It counts when every shard has said so; a word about an older lease counts for nothing."""
    session = pool.sessions.get(session_id)
    if session is None or not session.core.ended or lease_epoch < session.lease_epoch:
        return
    session.drained_ranks.add(rank)
    if len(session.drained_ranks) == pool.world_size:
        _drained(pool, session)


def _fence(pool: "HostedPool", session: EngineSession) -> None:
    fence = registry_pb2.FenceSession(session_id=session.session_id, lease_epoch=session.lease_epoch)
    command = registry_pb2.ControlResponse(fence_session=fence)
    Broadcast(pool.links.values(), command, lambda done: _fenced(pool, session, done))


def _fenced(pool: "HostedPool", session: EngineSession, broadcast: Broadcast) -> None:
    if pool.sessions.get(session.session_id) is not session:
        return
    if broadcast.failed:
        _log.error("session not fenced; trying again", session=session.session_id, pool=pool.pool_id)
        pool.call_later(FENCE_RETRY_SECONDS, lambda: _fence_again(pool, session))
        return
    session.fenced = True
    if session.mode == types_pb2.SESSION_MODE_REMOTE or not session.processes:
        _drained(pool, session)


def _fence_again(pool: "HostedPool", session: EngineSession) -> None:
    if pool.sessions.get(session.session_id) is session:
        _fence(pool, session)


def _drained(pool: "HostedPool", session: EngineSession) -> None:
    if pool.core is None or pool.sessions.pop(session.session_id, None) is None:
        return
    session.fenced = True
    pool.core.session_drained(session.session_id)
    forget = registry_pb2.ForgetSession(session_id=session.session_id, lease_epoch=session.lease_epoch)
    Broadcast(pool.links.values(), registry_pb2.ControlResponse(forget_session=forget))
