"""Attached processes on the event loop: connections, tickets, and what is told when a process ends."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass

import structlog

from kvplane.compute.arenas import Arenas
from kvplane.compute.attach_reply import Reply, arena_reply, pool_reply
from kvplane.compute.drains import Drains
from kvplane.compute.events import Events
from kvplane.compute.executor import Executor
from kvplane.compute.processes import Process
from kvplane.compute.sessions import Session
from kvplane.compute.state import Holding, ShardState
from kvplane.compute.tickets import Tickets
from kvplane.v1 import attach_pb2, compute_pb2, registry_pb2, types_pb2
from kvplane.wire import features
from kvplane.wire.errors import InvalidArgumentError, KvplaneError, PermissionDeniedError, PreconditionError
from kvplane.wire.limits import SESSION_RANKS

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of one process, as long as it is open."""

    session_id: int
    lease_epoch: int
    messages: "asyncio.Queue[attach_pb2.AttachToProcess]"
    process: Process | None = None
    """None: it maps an arena."""


class Attachments:
    """Who has mapped what. Used on the event loop; the process table itself belongs to the device thread."""

    def __init__(self, state: ShardState, executor: Executor, events: Events, arenas: Arenas, tickets: Tickets) -> None:
        self.arenas = arenas
        self.tickets = tickets
        self.state = state
        self._executor = executor
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._watched: set[Process] = set()
        self.drains = Drains(state, executor, events, self._watched, self._reachable)
        self._background: set[asyncio.Future[None]] = set()

    def resume(self) -> None:
        """Watch the processes of a pool that was taken up again; those that are gone are reported."""
        holding = self.state.holding
        for process in holding.processes.all() if holding is not None else ():
            self._watch(process)

    async def request(self, request: compute_pb2.AttachRequest, peer: str) -> bytes:
        """Check an Attach and give a ticket. Raises what refuses it."""
        features.require(request.required_features)
        if not peer.startswith(("unix:", "ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")):
            raise PreconditionError("memory can be mapped on this host only", reason="OTHER_HOST")
        if request.rank >= SESSION_RANKS:
            raise InvalidArgumentError.of("rank", f"{request.rank} is not below {SESSION_RANKS}")
        await self._executor.submit(lambda: self._authenticate(request))
        return self.tickets.give(request)

    def _authenticate(self, request: compute_pb2.AttachRequest) -> None:
        session = self.state.admitting().sessions.authenticate(
            request.session_id, request.lease_epoch, request.session_secret
        )
        needed = {
            compute_pb2.ATTACH_PURPOSE_POOL: types_pb2.SESSION_MODE_ATTACHED,
            compute_pb2.ATTACH_PURPOSE_ARENA: types_pb2.SESSION_MODE_REMOTE,
        }.get(request.purpose)
        if needed is None:
            raise InvalidArgumentError.of("purpose", "is not set")
        if session.mode != needed:
            raise PermissionDeniedError(
                f"session {session.session_id} is {types_pb2.SessionMode.Name(session.mode)}, it may not map this"
            )

    def _serving(self, session_id: int, lease_epoch: int) -> Holding:
        """The pool that a session is served on with this lease. Raises what refuses it."""
        holding = self.state.held()
        session = holding.sessions.get(session_id)
        if session is None:
            raise PermissionDeniedError(f"session {session_id} is gone")
        session.check(lease_epoch)
        return holding

    async def arena(self, session_id: int, lease_epoch: int, num_bytes: int) -> tuple[Reply, int]:
        """Make an arena; returns its id with the reply. Raises what `Arenas.create` raises."""
        await self._executor.submit(lambda: self._serving(session_id, lease_epoch))
        arena = await self.arenas.create(session_id, num_bytes)
        try:
            # Reserving the memory took its time: a session that has ended meanwhile has nobody who closes it.
            holding = await self._executor.submit(lambda: self._serving(session_id, lease_epoch))
            return arena_reply(self.state, holding, arena), arena.arena_id
        except BaseException:
            self.arenas.close(arena.arena_id)
            raise

    async def attach(self, session_id: int, lease_epoch: int, pid: int, rank: int) -> tuple[Reply, Process]:
        """Hold a process and tell the control plane. Raises what `Processes.attach` and `pool_reply` raise."""

        def job() -> tuple[Reply, Process]:
            holding = self._serving(session_id, lease_epoch)
            process = holding.processes.attach(session_id, lease_epoch, pid, rank)
            try:
                return pool_reply(self.state, holding, process), process
            except KvplaneError:
                holding.processes.remove(process)
                raise

        reply, process = await self._executor.submit(job)
        self._watch(process)
        attached = registry_pb2.SessionAttached(
            session_id=session_id, lease_epoch=lease_epoch, process=process.reference
        )
        self._events.add(registry_pb2.ShardEvent(session_attached=attached))
        _log.info("process attached", session=session_id, pid=pid, rank=rank)
        return reply, process

    def connected(self, connection: Connection) -> None:
        """A process may be told things from now on."""
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """Its connection closed; its hold map stays in force until it is gone."""
        self._connections.discard(connection)

    def drained(self, connection: Connection, lease_epoch: int) -> None:
        """A process launches nothing more."""
        process = connection.process
        if process is None or lease_epoch < connection.lease_epoch:
            return
        self.drains.said(process, lease_epoch)

    def fenced(self, command: registry_pb2.FenceSession) -> None:
        """Tell the session's processes that its lease is over, or end them when the operator opted in."""
        ended = attach_pb2.LeaseEnded(lease_epoch=command.lease_epoch)
        for connection in self._connections:
            if connection.session_id == command.session_id and connection.lease_epoch <= command.lease_epoch:
                connection.messages.put_nowait(attach_pb2.AttachToProcess(lease_ended=ended))
        for process in self._watched:
            covered = process.session_id == command.session_id and process.lease_epoch <= command.lease_epoch
            if command.kill and covered and process.pidfd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        self.drains.fenced(command.session_id, command.lease_epoch)

    def pool_released(self, old: Holding) -> None:
        """The pool's memory has no name any more: say so to those who mapped it, stop watching them, and close the
        arenas of sessions that went with it."""
        released = attach_pb2.PoolReleased(pool_epoch=old.pool.pool_epoch)
        for connection in self._connections:
            if connection.process is not None:
                connection.messages.put_nowait(attach_pb2.AttachToProcess(pool_released=released))
        for process in old.processes.released:
            self._unwatch(process)
            if process.pidfd is not None:
                os.close(process.pidfd)
        old.processes.released.clear()
        now = self.state.holding
        for session in old.sessions:
            if now is None or now.sessions.get(session.session_id) is None:
                self.arenas.close_session(session.session_id)

    def confirmed(self, event: registry_pb2.ShardEvent) -> None:
        """The control plane knows that a process is gone: its row and hold map are over."""
        holding = self.state.holding
        if not event.HasField("process_gone") or holding is None:
            return
        gone = event.process_gone
        process = holding.processes.find(gone.process, gone.session_id)
        if process is not None:
            found = process

            def forget() -> None:
                holding.processes.remove(found)
                # It may have written stamps to its last moment, and without processes nobody looks at them any more.
                holding.occupancy.changes += 1

            future = self._executor.submit(forget, bounded=False)
            self._background.add(future)
            future.add_done_callback(self._background.discard)

    def alive(self, session: Session) -> int:
        """Processes of a session that run."""
        return sum(each.session_id == session.session_id for each in self._watched)

    @property
    def count(self) -> int:
        """Processes that run."""
        return len(self._watched)

    def _watch(self, process: Process) -> None:
        self._watched.add(process)
        # It has not drained, so what was said before is over.
        self.drains.forget(process.session_id)
        if process.pidfd is None:
            self._gone(process)
        else:
            self._loop.add_reader(process.pidfd, self._gone, process)

    def _unwatch(self, process: Process) -> None:
        if process not in self._watched:
            return
        self._watched.remove(process)
        if process.pidfd is not None:
            self._loop.remove_reader(process.pidfd)
        if not any(each.session_id == process.session_id for each in self._watched):
            self.drains.forget(process.session_id)

    def _reachable(self) -> set[Process]:
        return {each.process for each in self._connections if each.process is not None}

    def _gone(self, process: Process) -> None:
        self._unwatch(process)
        remaining = sum(each.session_id == process.session_id for each in self._watched)
        _log.info("process gone", session=process.session_id, pid=process.pid, remaining=remaining)
        gone = registry_pb2.ProcessGone(
            session_id=process.session_id,
            lease_epoch=process.lease_epoch,
            process=process.reference,
            remaining=remaining,
        )
        self._events.add(registry_pb2.ShardEvent(process_gone=gone))
        self.drains.tell(process.session_id)
