"""A pool and its shards: when it is open, its steps, its seals, and how its sessions end."""

from collections.abc import Callable

import numpy as np
import structlog

from kvplane.cache.core import CacheCore, CoreConfig
from kvplane.cache.service import identities
from kvplane.cache.service.ages import WAITING, Ages
from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.encode import write_statistics
from kvplane.cache.service.held_pools import recoverable
from kvplane.cache.service.metrics import Metrics
from kvplane.cache.service.recovering import PoolRecovery
from kvplane.cache.service.seals import SealPump
from kvplane.cache.service.sessions import EngineSession
from kvplane.cache.service.shards import Broadcast, ShardLink
from kvplane.v1 import cache_pb2, registry_pb2, types_pb2
from kvplane.wire.errors import (
    PoolLostError,
    StaleEpochError,
    UnavailableError,
)

_log = structlog.get_logger(__name__)

CallLater = Callable[[float, Callable[[], None]], None]

CREATE_RETRY_SECONDS = 2.0
"""When a pool that a shard could not create is tried again."""

RETRY_SECONDS = 0.5
"""When asking a pool that is not open makes sense again."""


class HostedPool:
    """One pool. `clock` gives seconds, `call_later(seconds, call)` calls back."""

    def __init__(
        self,
        template: registry_pb2.RegisterRequest,
        config: CacheConfig,
        metrics: Metrics,
        grant_key: bytes,
        call_later: CallLater,
        clock: Callable[[], float],
        note_lost: Callable[[list[int]], None],
    ) -> None:
        self.pool_id = template.pool_id
        self.template = template
        self.grant_key = grant_key
        self.state: types_pb2.PoolState.ValueType = types_pb2.POOL_STATE_RECONCILING
        self.pool_epoch = 0
        self.incarnation = 1
        self.links: dict[int, ShardLink] = {}
        self.core: CacheCore | None = None
        self.sessions: dict[int, EngineSession] = {}
        self._config = config
        self.metrics = metrics
        self.call_later = call_later
        self.clock = clock
        self._note_lost = note_lost
        self._creating = False
        self._served = False
        """This start of the control plane has had the pool open: what shards said before that is old."""
        self.recovery: PoolRecovery | None = None
        self.gone_processes: set[tuple[int, int, int]] = set()
        """Attached processes whose end was seen while nobody knew their sessions: (rank, process id, start ticks)."""
        self.seals: SealPump | None = None
        self.ages = Ages()

    # Shards and the pool's life

    @property
    def world_size(self) -> int:
        """How many shards make the pool."""
        return self.template.shard.world_size

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included; 0 before the pool is there."""
        return self.core.config.num_blocks if self.core is not None else 0

    @property
    def complete(self) -> bool:
        """Whether every shard has a live control stream (I11)."""
        return len(self.links) == self.world_size and all(link.connected for link in self.links.values())

    @property
    def abandoned(self) -> bool:
        """Whether nothing is left of the pool: no shard, no bytes."""
        return not self.links and self.core is None

    def stream_opened(self, link: ShardLink) -> None:
        """A shard's control stream is there (again): the pool is created, or goes on."""
        _log.info("shard connected", pool=self.pool_id, rank=link.rank, boot_id=link.boot_id)
        if not self.complete:
            return
        if self.core is None:
            self._begin()
        elif self.state == types_pb2.POOL_STATE_RECONCILING and self.recovery is None:
            self._set_state(types_pb2.POOL_STATE_READY, "all shards are connected")

    def stream_lost(self, link: ShardLink) -> None:
        """A control stream broke: nothing is allocated until it is back. The bytes are not lost."""
        link.lost()
        _log.warning("shard disconnected", pool=self.pool_id, rank=link.rank)
        if self.core is not None and self.state == types_pb2.POOL_STATE_READY:
            self._set_state(types_pb2.POOL_STATE_RECONCILING, f"shard {link.rank} is disconnected")

    def remove(self, link: ShardLink, reason: str) -> None:
        """A shard is gone for good, and with it the bytes of this epoch."""
        del self.links[link.rank]
        if link.close is not None:
            link.close(UnavailableError(reason, reason="SHARD_LOST", retry_after_seconds=RETRY_SECONDS))
        link.lost()
        link.abandon(reason)
        if self.core is not None or self._creating:
            self.lose(reason)
        else:
            self.recovery = None  # it begins again with what comes in the shard's place

    def lose(self, reason: str) -> None:
        """The bytes of this epoch are gone: its sessions end, and a new epoch begins when all shards are there. Its
        incarnation is new too, so that no generation of the old epoch is handed out again."""
        _log.error("pool lost", pool=self.pool_id, pool_epoch=self.pool_epoch, reason=reason)
        if self.core is not None:
            self._set_state(types_pb2.POOL_STATE_LOST, reason)
        error = PoolLostError(f"pool {self.pool_id} epoch {self.pool_epoch} is lost: {reason}")
        for session in self.sessions.values():
            if session.close_stream is not None:
                session.close_stream(error)
        self._note_lost([*self.sessions, *(self.recovery.known if self.recovery is not None else ())])
        self.sessions.clear()
        self.core, self.seals, self._creating, self.recovery = None, None, False, None
        self._served = True
        self.ages = Ages()
        self.incarnation += 1
        for link in self.links.values():
            link.abandon(reason)
        self.state = types_pb2.POOL_STATE_RECONCILING
        if self.complete:
            self._begin()

    def forget(self, reason: str) -> None:
        """Another control plane decides now, or has decided meanwhile: what this one knows is old. The bytes are there,
        and so are the sessions that the shards know: it begins anew, as after a restart, when it has all shards."""
        _log.error("pool forgotten", pool=self.pool_id, pool_epoch=self.pool_epoch, reason=reason)
        error = StaleEpochError(f"pool {self.pool_id} is, or was, another control plane's: resume the session")
        for session in self.sessions.values():
            if session.close_stream is not None:
                session.close_stream(error)
        self.sessions.clear()
        self.core, self.seals, self._creating, self.recovery = None, None, False, None
        self.ages, self._served = Ages(), False
        self.state = types_pb2.POOL_STATE_RECONCILING
        links, self.links = list(self.links.values()), {}
        for link in links:
            if link.close is not None:
                link.close(UnavailableError(reason, reason="RECONCILING", retry_after_seconds=RETRY_SECONDS))
            link.lost()
            link.abandon(reason)

    def survives_in(self, held: registry_pb2.HeldPool) -> bool:
        """Whether a shard that was restarted still holds this very pool."""
        model = identities.model_identity(self.template.model, "model").encode()
        mine = (self.pool_epoch, self.num_blocks, model)
        return self.core is not None and (held.pool_epoch, held.num_blocks, held.model_identity) == mine

    def distrust(self, reason: str) -> None:
        """Nothing published so far may be hit again: bytes turned out to be damaged."""
        _log.error("cache reset", pool=self.pool_id, reason=reason)
        if self.core is not None:
            self.core.reset()
            rows = [namespace_row(self.core, each) for each in range(len(self.core.state.namespaces))]
            put = registry_pb2.PutNamespaces(namespaces=rows)
            Broadcast(self.links.values(), registry_pb2.ControlResponse(put_namespaces=put))

    def open_core(self) -> CacheCore:
        """The core of an open pool. Raises `UnavailableError`."""
        if self.core is None or self.state != types_pb2.POOL_STATE_READY:
            raise UnavailableError(
                f"pool {self.pool_id} is {types_pb2.PoolState.Name(self.state)}",
                reason=types_pb2.PoolState.Name(self.state).removeprefix("POOL_STATE_"),
                retry_after_seconds=RETRY_SECONDS,
            )
        return self.core

    def tick(self) -> None:
        """Time has passed."""
        if self.recovery is not None:
            self.recovery.check()

    def recovered(self) -> None:
        """Everybody has said what they hold, or has been fenced: the pool opens."""
        self.recovery = None
        self.gone_processes.clear()
        self._set_state(types_pb2.POOL_STATE_READY, "recovered")

    def process_gone(self, session_id: int, process: tuple[int, int, int]) -> None:
        """A shard has seen a process end whose session is not open (yet)."""
        self.gone_processes.add(process)
        if self.recovery is not None:
            self.recovery.gone(process, session_id)

    def put_namespaces(self, tenants: list[str]) -> None:
        """Have every shard store all namespaces; `tenants` by id."""
        assert self.core is not None
        rows = [namespace_row(self.core, each, tenant) for each, tenant in enumerate(tenants)]
        put = registry_pb2.PutNamespaces(namespaces=rows)
        Broadcast(self.links.values(), registry_pb2.ControlResponse(put_namespaces=put))

    def _begin(self) -> None:
        """All shards are there, and the pool is not: take up what they hold, or create it."""
        for link in self.links.values():
            link.incarnation = self.incarnation
        if self._served or not recoverable(list(self.links.values())):
            self._create()
        elif self.recovery is None:
            self.recovery = PoolRecovery(self)
            self.pool_epoch = self.recovery.pool_epoch
            self.recovery.begin()

    def _create(self) -> None:
        if self._creating:
            return
        self._creating = True
        self.pool_epoch += 1
        epoch, num_blocks = self.pool_epoch, min(link.register.max_blocks for link in self.links.values())
        create = registry_pb2.CreatePool(
            pool_epoch=self.pool_epoch,
            num_blocks=num_blocks,
            segments=[types_pb2.SegmentSpec(first_block=0, num_blocks=num_blocks)],
        )
        Broadcast(
            self.links.values(),
            registry_pb2.ControlResponse(create_pool=create),
            lambda done: self._created(done, epoch, num_blocks),
        )

    def _created(self, broadcast: Broadcast, epoch: int, num_blocks: int) -> None:
        if epoch != self.pool_epoch or not self._creating:
            return  # the pool was lost meanwhile
        self._creating = False
        if broadcast.failed:
            reasons = [command.ack.status.message for command in broadcast.commands if command.ack and command.failed]
            _log.error("pool not created", pool=self.pool_id, reasons=reasons)
            self.call_later(CREATE_RETRY_SECONDS, self._create_again)
            return
        self.adopt_core(self.new_core(num_blocks))
        if self.complete:
            self._set_state(types_pb2.POOL_STATE_READY, "created")

    def new_core(self, num_blocks: int) -> CacheCore:
        """An empty core of this pool's size and model."""
        return CacheCore(
            CoreConfig(
                num_blocks=num_blocks,
                model=identities.model_identity(self.template.model, "model"),
                incarnation=self.incarnation,
                group=identities.group_spec(self.template.groups, "groups"),
                prefix_caching=self._config.prefix_caching,
                watermark=self._config.watermark,
                max_sequence_tokens=self._config.max_prompt_tokens,
            )
        )

    def adopt_core(self, core: CacheCore) -> None:
        """Decide with this core from now on; it allocates nothing before the pool is open."""
        self.core, self._served = core, True
        core.set_ready(False)
        self.seals = SealPump(self, core, self._config.seal_interval_seconds)

    def _create_again(self) -> None:
        if self.core is None and self.complete:
            self._begin()

    def _set_state(self, state: "types_pb2.PoolState.ValueType", reason: str) -> None:
        self.state = state
        _log.info("pool state", pool=self.pool_id, state=types_pb2.PoolState.Name(state), reason=reason)
        if self.core is not None:
            self.core.set_ready(state == types_pb2.POOL_STATE_READY)
        notice = cache_pb2.PoolStateNotice(state=state, pool_epoch=self.pool_epoch, reason=reason)
        for session in self.sessions.values():
            session.notify(cache_pb2.Notice(pool_state=notice))
        command = registry_pb2.ControlResponse(pool_state=registry_pb2.PoolStateCommand(state=state))
        Broadcast(self.links.values(), command)

    # Description

    def stats(self) -> types_pb2.PoolStats:
        """Counters, all zero before the pool is created."""
        stats = types_pb2.PoolStats()
        if self.core is not None:
            state = self.core.state
            write_statistics(stats, self.core.statistics())
            stats.running_sequences = state.running
            stats.waiting_sequences = int(np.count_nonzero(np.isin(state.rows.status, WAITING)))
        return stats

    def describe(self) -> types_pb2.Pool:
        """The pool as it is now."""
        template = self.template
        return types_pb2.Pool(
            pool_id=self.pool_id,
            pool_epoch=self.pool_epoch,
            state=self.state,
            incarnation=self.incarnation,
            model=template.model,
            layout=template.layout,
            groups=template.groups,
            shards=[
                types_pb2.Shard(
                    rank=link.rank,
                    address=link.register.address,
                    boot_id=link.boot_id,
                    connected=link.connected,
                    spec=link.register.shard,
                )
                for link in sorted(self.links.values(), key=lambda link: link.rank)
            ],
            num_blocks=self.num_blocks,
            max_sequences=self._config.max_sequences,
            stats=self.stats(),
        )


def namespace_row(core: CacheCore, namespace_id: int, tenant_id: str = "") -> registry_pb2.NamespaceRow:
    """A namespace as shards store it."""
    namespaces = core.state.namespaces
    return registry_pb2.NamespaceRow(
        namespace_id=namespace_id,
        root_digest=namespaces.root(namespace_id),
        version=namespaces.version(namespace_id),
        tenant_id=tenant_id,
        identity=namespaces.identity(namespace_id),
    )
