"""Which sessions have drained on this shard: nothing of them runs, and nothing will.

Attached processes say so. Two kinds cannot any more: one that said so before its lease ended, and closed its
connection; and one whose connection went with an earlier start of this service. Of that one the hold map tells: a bit
is set before the lease is looked at, so a map that is empty a time to live after the fence stays without work
(docs/protocol.md).
"""

import asyncio
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import structlog

from kvplane.compute.events import Events
from kvplane.compute.executor import Executor
from kvplane.compute.processes import Process
from kvplane.compute.sessions import Session
from kvplane.compute.state import ShardState
from kvplane.v1 import registry_pb2

_log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.5
"""How often hold maps are looked at."""


class Drains:
    """Used on the event loop. `watched` are the processes that run, `connected` those that can be asked."""

    def __init__(
        self,
        state: ShardState,
        executor: Executor,
        events: Events,
        watched: AbstractSet[Process],
        connected: Callable[[], AbstractSet[Process]],
    ) -> None:
        self._state = state
        self._executor = executor
        self._events = events
        self._watched = watched
        self._connected = connected
        self._told: dict[int, int] = {}
        """Newest lease epoch that the control plane was told a session has drained."""
        self._fences: dict[int, int] = {}
        """Newest lease epoch up to which each session was fenced: not every shard has served that lease."""
        self._since: dict[tuple[Process, int], float] = {}
        """When a process without a connection was first seen fenced, and under which lease."""

    def said(self, process: Process, lease_epoch: int) -> None:
        """A process has said that it launches nothing more."""
        process.said_drained = True
        self._drained(process, lease_epoch)

    def tell(self, session_id: int, nobody_left: int = 0) -> None:
        """Tell the control plane up to which lease all processes of a session have drained, when that is news.

        `nobody_left` is said when there are none; the end of the last one says it all, unless the pool was released.
        """
        left = [each.drained_epoch for each in self._watched if each.session_id == session_id]
        epoch = min(left, default=nobody_left)
        if epoch > self._told.get(session_id, 0):
            if left:
                self._told[session_id] = epoch
            event = registry_pb2.SessionDrained(session_id=session_id, lease_epoch=epoch)
            self._events.add(registry_pb2.ShardEvent(session_drained=event))

    def forget(self, session_id: int) -> None:
        """What was told of a session is over: it has another process, or none."""
        self._told.pop(session_id, None)

    def fenced(self, session_id: int, lease_epoch: int) -> None:
        """A lease has ended; what was told before that counted for nothing."""
        self._fences[session_id] = max(lease_epoch, self._fences.get(session_id, 0))
        connected = self._connected()
        for process in self._watched:
            if process.session_id == session_id and process.said_drained and process not in connected:
                process.drained_epoch = max(process.drained_epoch, lease_epoch)
        self.forget(session_id)
        self.tell(session_id)

    async def run(self) -> None:
        """Look at the hold maps of processes that nobody can ask, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            waits = {}
            for process, session in self._unreachable():
                lease_epoch = max(session.lease_epoch, self._fences.get(session.session_id, 0))
                if process.drained_epoch >= lease_epoch:
                    continue
                since = waits[process, lease_epoch] = self._since.get((process, lease_epoch), now)
                if now - since >= session.ttl_ms / 1000:
                    await self._look(process, session, lease_epoch)
            self._since = waits

    def _unreachable(self) -> list[tuple[Process, Session]]:
        """Processes without a connection whose session is fenced."""
        holding = self._state.holding
        if holding is None:
            return []
        self._fences = {each: epoch for each, epoch in self._fences.items() if holding.sessions.get(each) is not None}
        found = [(each, holding.sessions.get(each.session_id)) for each in self._watched - self._connected()]
        return [(process, session) for process, session in found if session is not None and session.fenced]

    async def _look(self, process: Process, session: Session, lease_epoch: int) -> None:
        try:
            empty = await self._executor.submit(lambda: self._holds_nothing(process), bounded=False)
        except Exception as error:
            # Whatever it is, this one process is taken to hold its blocks, and the others are looked at.
            _log.warning("hold map not read", session=process.session_id, pid=process.pid, reason=str(error))
            return
        if empty and session.fenced and process in self._watched:
            _log.info("process holds nothing", session=process.session_id, pid=process.pid)
            self._drained(process, lease_epoch)

    def _holds_nothing(self, process: Process) -> bool:
        holding = self._state.holding
        return holding is not None and process in holding.processes.all() and not process.bits().any()

    def _drained(self, process: Process, lease_epoch: int) -> None:
        process.drained_epoch = max(process.drained_epoch, lease_epoch)
        self.tell(process.session_id, lease_epoch)
