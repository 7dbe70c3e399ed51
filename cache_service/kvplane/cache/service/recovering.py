"""A pool after a restart of the control plane: read what the shards hold, wait for the engines that they know, open.

Raise the incarnation on all shards; read their inventories; index what survived; take declarations; fence whoever is
silent for longer than its time to live; read stamps and hold maps once more; open. What a shard answers is acted on
only when all of them have answered.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog

from kvplane.cache.core.sessions import MAX_TTL_SECONDS, MIN_TTL_SECONDS
from kvplane.cache.service.endings import end_session
from kvplane.cache.service.held_pools import known_sessions, restore_namespaces
from kvplane.cache.service.inventories import Mask, Upload, survivors, unsound
from kvplane.cache.service.sessions import EngineSession
from kvplane.cache.service.shards import Broadcast
from kvplane.v1 import registry_pb2, types_pb2
from kvplane.wire.errors import SessionExpiredError
from kvplane.wire.packed import U32Array, U64Array
from kvplane.wire.stamps import held_blocks

if TYPE_CHECKING:
    from kvplane.cache.service.pools import HostedPool

Then = Callable[[], None]

_log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
"""When what a shard could not do is asked for again."""


class PoolRecovery:
    """One recovery of one pool. It is over when the pool's is another, or none."""

    def __init__(self, pool: "HostedPool") -> None:
        self._pool = pool
        self._held = [pool.links[rank].register.held_pool for rank in sorted(pool.links)]
        self.num_blocks = self._held[0].num_blocks
        self.pool_epoch = self._held[0].pool_epoch
        self.known = known_sessions(self._held)
        """Sessions that have not declared what they hold."""
        self._silent: dict[int, EngineSession] = {}
        self._inventory_id = 0
        self._uploads: dict[int, Upload] = {}
        """What each rank has uploaded, as a whole, of the newest inventory."""
        self._rows: dict[int, Upload] = {}
        """The first inventory."""
        self._concluding = False

    # The way up

    def begin(self) -> None:
        """Have every shard store the incarnation: before that is done, nothing of it is used."""
        command = registry_pb2.ControlResponse(raise_incarnation=registry_pb2.RaiseIncarnation())
        self._broadcast(command, lambda: self._read(self._survive, stamps=True))

    def upload(self, rank: int, inventory_id: int, upload: Upload) -> None:
        """A shard has uploaded an inventory to the end."""
        if inventory_id == self._inventory_id:
            self._uploads[rank] = upload

    def attached(self, process: tuple[int, int, int], session_id: int) -> None:
        """A process of a session that has not come back yet has mapped the pool."""
        known = self.known.get(session_id)
        if known is not None:
            known.processes.add(process)
            known.had_processes = True

    def gone(self, process: tuple[int, int, int], session_id: int) -> None:
        """A shard has seen a process of a session end that has not come back yet."""
        known = self.known.get(session_id)
        if known is not None:
            known.processes.discard(process)

    def check(self) -> None:
        """Fence whoever is silent for too long; open the pool when nobody is waited for."""
        pool, now = self._pool, self._pool.clock()
        if pool.core is None or self._concluding:
            return
        for known in list(self.known.values()):
            session = pool.sessions.get(known.session_id)
            if known.gone or now >= known.deadline or (session is not None and session.core.ended):
                self.end(known.session_id)
        fenced = all(session.fenced for session in self._silent.values())
        if not self.known and fenced and pool.complete:
            self._concluding = True
            self._read(self._conclude, stamps=True, hold_maps=True, omit_rows=True)

    def reopened(self, session_id: int, ttl_seconds: float) -> None:
        """An engine has come back; it has its time to live once more to say what it holds."""
        known = self.known[session_id]
        if session_id not in self._pool.sessions:
            known.deadline = max(known.deadline, self._pool.clock() + ttl_seconds)

    def declared(self, session_id: int) -> None:
        """A session has said what it holds."""
        self.known.pop(session_id, None)

    def granted(self, session_id: int, sequence_id: int, ids: U32Array, generations: U64Array) -> Mask:
        """Which entries of a table every shard has granted just so, shape [len(ids)]."""
        found = np.ones(len(ids), np.bool_)
        for upload in self._rows.values():
            found &= upload.granted(session_id, sequence_id, ids, generations)
        return found

    def granted_any(self, session_id: int, ids: U32Array, generations: U64Array) -> Mask:
        """Which blocks any shard has granted to a session, shape [len(ids)]: its work may run on no other ones."""
        found = np.zeros(len(ids), np.bool_)
        for upload in self._rows.values():
            found |= upload.granted_any(session_id, ids, generations)
        return found

    def end(self, session_id: int, *, drained: bool = False) -> None:
        """Nobody comes back for a session: fence it. What an attached one may still touch is deferred at the end."""
        pool, known = self._pool, self.known.pop(session_id)
        core = pool.core
        assert core is not None
        session = pool.sessions.get(session_id)
        if session is None:
            ttl = min(max(known.ttl_seconds, MIN_TTL_SECONDS), MAX_TTL_SECONDS)
            session = EngineSession(
                core=core.open_session(pool.clock(), 1, ttl, session_id),
                pool_id=pool.pool_id,
                mode=known.mode,
                num_ranks=1,
                engine_name="",
                tenant_id=known.tenant_id,
                namespace_id=0,
                resume_token=b"",
                secret=b"",
                lease_epoch=known.lease_epoch,
                processes=known.processes,
            )
            pool.sessions[session_id] = session
        _log.warning("session not resumed", session=session_id, pool=pool.pool_id, gone=known.gone)
        self._silent[session_id] = session
        error = SessionExpiredError(f"session {session_id} has not declared what it holds")
        end_session(pool, session, error, drained=drained)

    # How

    def _broadcast(self, command: registry_pb2.ControlResponse, then: Then) -> None:
        def done(broadcast: Broadcast) -> None:
            if self._pool.recovery is not self:
                return
            if broadcast.failed:
                reasons = [each.ack.status.message for each in broadcast.commands if each.ack and each.failed]
                _log.error("recovery: a shard could not do its part", pool=self._pool.pool_id, reasons=reasons)
                self._pool.call_later(RETRY_SECONDS, lambda: self._again(command, then))
                return
            then()

        Broadcast(self._pool.links.values(), command, done)

    def _again(self, command: registry_pb2.ControlResponse, then: Then) -> None:
        if self._pool.recovery is self:
            self._broadcast(command, then)

    def _read(self, then: Then, **what: bool) -> None:
        """Have every shard upload its directory; `then` follows when all have."""
        self._inventory_id += 1
        self._uploads = {}

        def uploaded() -> None:
            if len(self._uploads) < len(self._pool.links):
                # Acknowledged, and not uploaded here: by a shard that has lost its pool meanwhile.
                self._pool.call_later(RETRY_SECONDS, again)
            else:
                then()

        def again() -> None:
            if self._pool.recovery is self:
                self._read(then, **what)

        request = registry_pb2.RequestInventory(inventory_id=self._inventory_id, **what)
        self._broadcast(registry_pb2.ControlResponse(request_inventory=request), uploaded)

    def _survive(self) -> None:
        pool, self._rows = self._pool, self._uploads
        core = pool.new_core(self.num_blocks)
        tenants = restore_namespaces(core, self._held)
        found = survivors([self._rows[rank] for rank in sorted(self._rows)], pool.incarnation)
        kept = core.survive(found)
        pool.adopt_core(core)
        pool.put_namespaces(tenants)
        now = pool.clock()
        for known in self.known.values():
            known.deadline = now + known.ttl_seconds
            known.processes -= pool.gone_processes
        _log.info(
            "recovering", pool=pool.pool_id, blocks=kept, sealed=int(found.sealed.sum()), sessions=len(self.known)
        )
        self.check()

    def _conclude(self) -> None:
        pool, core = self._pool, self._pool.core
        assert core is not None
        if not pool.complete:
            self._concluding = False
            return
        held: dict[int, list[np.ndarray[tuple[int], np.dtype[np.intp]]]] = {}
        for upload in self._uploads.values():
            for hold_map in upload.hold_maps:
                blocks = held_blocks(np.frombuffer(hold_map.bitmap, np.uint8))
                held.setdefault(hold_map.session_id, []).append(blocks)
        for session_id, blocks_of in held.items():
            session = pool.sessions.get(session_id)
            if session is not None and session.core.ended:
                core.defer_held(session_id, np.concatenate(blocks_of).astype(np.int64))
        newest = np.maximum.reduce([upload.stamps for upload in self._uploads.values()])
        lost = core.conclude(newest)
        columns = core.state.columns
        kept = columns.indexed | (columns.references > 0)
        for link in pool.links.values():
            ids, generations = unsound(self._rows[link.rank], kept)
            if len(ids):
                named = types_pb2.BlockList(block_ids=ids.tobytes(), generations=generations.tobytes())
                void = registry_pb2.VoidRows(blocks=[named])
                link.command(registry_pb2.ControlResponse(void_rows=void))
        _log.info("recovered", pool=pool.pool_id, lost=lost)
        pool.recovered()
