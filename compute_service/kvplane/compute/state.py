"""What a shard is and has: its identity, the control plane it follows, its pool and the sessions on it."""

from dataclasses import dataclass
from pathlib import Path

from kvplane.compute.device import Device
from kvplane.compute.layout import PoolLayout
from kvplane.compute.occupancy import Occupancy
from kvplane.compute.pool import Pool
from kvplane.compute.processes import Processes
from kvplane.compute.sessions import Sessions
from kvplane.v1 import types_pb2
from kvplane.wire.errors import SupersededError, UnavailableError
from kvplane.wire.identity import ModelIdentity

RETRY_SECONDS = 0.5
"""When asking a shard without a pool makes sense again."""


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """What does not change while the process runs."""

    pool_id: str
    boot_id: int
    """Random, never 0."""
    model: ModelIdentity
    groups: tuple[types_pb2.GroupSpec, ...]
    spec: types_pb2.ShardSpec
    layout_identity: types_pb2.LayoutIdentity
    layout: PoolLayout
    folder: Path
    """Where the shared memory's names are."""
    device: Device


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """A pool with everything that is kept of it: replaced as a whole when the pool is."""

    pool: Pool
    occupancy: Occupancy
    sessions: Sessions
    processes: Processes

    @classmethod
    def of(cls, pool: Pool, folder: Path) -> "Holding":
        """Begin to serve a pool whose hold maps are in `folder`."""
        return cls(pool, Occupancy(pool), Sessions(pool.directory), Processes(pool, folder))

    def next_epoch(self, pool_epoch: int, *, keep_sealed: bool) -> "Holding":
        """The same memory and processes under a new epoch: owners, tables and plans of the old one are gone."""
        self.pool.start_epoch(pool_epoch, keep_sealed=keep_sealed)
        return Holding(self.pool, Occupancy(self.pool), Sessions(self.pool.directory), self.processes)


class ShardState:
    """Changed on the device thread; single words are read on the event loop."""

    def __init__(self, identity: ShardIdentity) -> None:
        self.identity = identity
        self.holding: Holding | None = None
        self.grant_key: bytes | None = None
        self.pool_state: types_pb2.PoolState.ValueType = types_pb2.POOL_STATE_UNSPECIFIED
        self.draining = False
        self._incarnation = 0

    @property
    def incarnation(self) -> int:
        """Highest start of the control plane that this shard knows; kept beside the blocks once there are any."""
        return max(self._incarnation, self.holding.pool.incarnation if self.holding else 0)

    def raise_incarnation(self, incarnation: int) -> None:
        """Store a higher incarnation, before anything that it asks for. Raises `SupersededError` for a lower one."""
        if incarnation < self.incarnation:
            raise SupersededError(
                f"incarnation {incarnation} is over, this shard follows {self.incarnation}",
                metadata={"incarnation": str(self.incarnation)},
            )
        self._incarnation = incarnation
        if self.holding is not None:
            self.holding.pool.directory.header["incarnation"] = incarnation

    def admitting(self) -> Holding:
        """The pool, for what begins now. Raises `UnavailableError` before there is one and while the service drains."""
        if self.draining:
            raise UnavailableError("this compute service is draining", retry_after_seconds=RETRY_SECONDS)
        return self.held()

    def held(self) -> Holding:
        """The pool, for what has begun. Raises `UnavailableError` before there is one."""
        if self.holding is None:
            raise UnavailableError("this shard has no pool yet", retry_after_seconds=RETRY_SECONDS)
        return self.holding
