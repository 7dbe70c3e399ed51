"""Seals on their way: batched over all sessions, one batch in flight, at most one per interval (I3)."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvplane.cache.core import CacheCore, SealBatch
from kvplane.cache.service.shards import Broadcast, Command
from kvplane.v1 import registry_pb2, types_pb2

if TYPE_CHECKING:
    from kvplane.cache.service.pools import HostedPool


class SealPump:
    """Takes filled blocks from a core to all shards and their acknowledgements back. One per epoch of a pool."""

    def __init__(self, pool: "HostedPool", core: CacheCore, interval_seconds: float) -> None:
        self._pool = pool
        self._core = core
        self._interval = interval_seconds
        self._covered: dict[int, int] | None = None
        """Newest step of each session whose fills the batch under way covers; None: no batch is under way."""
        self._next = 0.0
        self._woken = False

    @property
    def idle(self) -> bool:
        """Whether everything that was filled is published."""
        return self._covered is None and not len(self._core.state.sealing)

    def pump_soon(self, now: float) -> None:
        """Call `pump` when the next batch may go out: behind the answer, so that no engine waits for its seals."""
        if self._covered is None and not self._woken and len(self._core.state.sealing):
            self._woken = True
            self._pool.call_later(max(0.0, self._next - now), self._pump)

    def _pump(self) -> None:
        """Send the next batch, if there is one and it is due."""
        now = self._pool.clock()
        self._woken = False
        if self._pool.seals is not self or self._covered is not None or not len(self._core.state.sealing):
            return
        if now < self._next:
            self.pump_soon(now)
            return
        batch = self._core.take_seals()
        if batch is None:
            return
        self._next = now + self._interval
        sessions = self._pool.sessions.values()
        self._covered = {session.session_id: session.core.ledger.newest_step for session in sessions}
        Broadcast(self._pool.links.values(), _command(batch), lambda done: self._sealed(done, batch))

    def _sealed(self, broadcast: Broadcast, batch: SealBatch) -> None:
        if self._pool.seals is not self:
            return  # the pool has lost these bytes meanwhile
        sealed = np.ones(len(batch.block_ids), np.bool_)
        for command in broadcast.commands:
            sealed &= _success(command, len(sealed))
        self._core.acknowledge_seals(batch.seal_id, None if sealed.all() else sealed)
        covered, self._covered = self._covered or {}, None
        for session_id, step_id in covered.items():
            if session_id in self._pool.sessions:
                self._pool.sessions[session_id].published_step = step_id
        self._pool.metrics.sealed_blocks.inc(int(sealed.sum()))
        self.pump_soon(self._next)


def _command(batch: SealBatch) -> registry_pb2.ControlResponse:
    blocks = types_pb2.BlockList(
        group=batch.group,
        block_ids=batch.block_ids.astype(np.uint32, copy=False).tobytes(),
        generations=batch.generations.tobytes(),
    )
    seal = registry_pb2.Seal(
        blocks=[blocks],
        digests=batch.digests,
        parent_digests=batch.parent_digests,
        depths=batch.depths.astype(np.uint32, copy=False).tobytes(),
        namespace_ids=batch.namespace_ids.astype(np.uint32, copy=False).tobytes(),
    )
    return registry_pb2.ControlResponse(seal=seal)


def _success(command: Command, count: int) -> npt.NDArray[np.bool_]:
    """Which blocks of a command succeeded on its shard, shape [count]."""
    if command.ack is None or command.failed:
        return np.zeros(count, np.bool_)
    bitmap = command.ack.success_bitmap
    if not bitmap:
        return np.ones(count, np.bool_)
    if len(bitmap) != -(-count // 8):
        return np.zeros(count, np.bool_)
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little", count=count)
    return bits.astype(np.bool_)
