"""How compute services join: registrations, their control streams, and what they report."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from kvplane.cache.service import identities
from kvplane.cache.service.endings import process_gone, session_drained
from kvplane.cache.service.inventories import Upload
from kvplane.cache.service.pools import HostedPool
from kvplane.cache.service.shards import Sender, ShardLink
from kvplane.v1 import registry_pb2
from kvplane.wire import directory, features
from kvplane.wire.errors import (
    AlreadyExistsError,
    IdentityMismatchError,
    InvalidArgumentError,
    KvplaneError,
    NotFoundError,
    PreconditionError,
    StaleEpochError,
    SupersededError,
    UnsupportedFeatureError,
)
from kvplane.wire.limits import TTL_MS_MAX

if TYPE_CHECKING:
    from kvplane.cache.service.control_plane import ControlPlane

_log = structlog.get_logger(__name__)

INCARNATION_MAX = 2**31
EPOCH_MAX = 2**62
"""Numbers that a shard cannot have reached honestly; past them nothing could rise any more."""

SHARD_FEATURES = ("seal", "fence")
"""What a shard must have built to serve a pool."""


class Registrations:
    """All shards of all pools, by registration id."""

    def __init__(self, plane: "ControlPlane") -> None:
        self._plane = plane
        self._links: dict[int, tuple[HostedPool, ShardLink]] = {}
        self._last_id = 0

    def register(self, request: registry_pb2.RegisterRequest) -> registry_pb2.RegisterResponse:
        """Admit a shard. A new boot in a rank whose old one is silent means that the pool's bytes are gone, unless it
        has taken them up again."""
        features.require(request.required_features)
        _check(request)
        pool = self._pool(request)
        old = pool.links.get(request.shard.rank)
        _raise_incarnation(pool, request, known=old is not None)
        now = self._plane.clock()
        if old is not None:
            link, link.register = old, request
        else:
            self._last_id += 1
            link = ShardLink(self._last_id, request, pool.incarnation, now)
            pool.links[request.shard.rank] = link
            self._links[link.registration_id] = (pool, link)
        link.incarnation = pool.incarnation
        link.last_heard = now
        _log.info("shard registered", pool=pool.pool_id, rank=link.rank, boot_id=link.boot_id)
        return registry_pb2.RegisterResponse(
            incarnation=pool.incarnation,
            registration_id=link.registration_id,
            grant_key=pool.grant_key,
            ttl_ms=round(1000 * self._plane.config.shard_ttl_seconds),
            keep_pool=pool.core is None and request.HasField("held_pool"),
        )

    def open_control(
        self, request: registry_pb2.ControlRequest, sender: Sender, close: Callable[[KvplaneError], None]
    ) -> tuple[HostedPool, ShardLink]:
        """Bind a control stream to its shard. Raises what refuses the stream."""
        if request.WhichOneof("message") != "open":
            raise InvalidArgumentError.of("open", "must be the first message of a stream")
        found = self._links.get(request.open.registration_id)
        if found is None:
            raise NotFoundError("the registration is unknown: register again", reason="REGISTRATION_NOT_FOUND")
        pool, link = found
        if pool.links.get(link.rank) is not link:
            raise NotFoundError("the registration was replaced: register again", reason="REGISTRATION_NOT_FOUND")
        if request.boot_id != link.boot_id:
            raise StaleEpochError(f"boot {request.boot_id} is not the registered one")
        if request.incarnation > pool.incarnation:
            raise SupersededError(f"the shard follows incarnation {request.incarnation}, this is {pool.incarnation}")
        link.last_heard = self._plane.clock()
        link.opened(sender, close)
        pool.stream_opened(link)
        return pool, link

    def control(self, pool: HostedPool, link: ShardLink, request: registry_pb2.ControlRequest) -> None:
        """A message of a bound control stream."""
        link.last_heard = self._plane.clock()
        kind = request.WhichOneof("message")
        if kind == "ack":
            link.acknowledged(request.ack)
        elif kind == "event":
            if link.next_event(request.event.event_id):
                self._event(pool, link, request.event)
            link.confirm_events()
        elif kind != "heartbeat":
            raise InvalidArgumentError.of("message", "is neither an acknowledgement, an event nor a heartbeat")

    def inventory(self, chunk: registry_pb2.InventoryRequest, upload: Upload | None) -> Upload:
        """A chunk of a shard's directory, behind those in `upload`. Raises what ends the call."""
        found = self._links.get(chunk.registration_id)
        if found is None or found[1].boot_id != chunk.boot_id:
            raise NotFoundError("the registration is unknown: register again", reason="REGISTRATION_NOT_FOUND")
        pool, link = found
        if pool.recovery is None:
            raise PreconditionError(f"inventory {chunk.inventory_id} was not asked for")
        link.last_heard = self._plane.clock()
        upload = upload or Upload(pool.recovery.num_blocks)
        upload.add(chunk)
        if chunk.last:
            pool.recovery.upload(link.rank, chunk.inventory_id, upload)
        return upload

    def lost(self, pool: HostedPool, link: ShardLink, sender: Sender) -> None:
        """A control stream ended, unless a newer one has taken its place."""
        if link.sender is sender:
            pool.stream_lost(link)

    def tick(self, now: float) -> None:
        """Shards that were silent for longer than their time to live are lost, connected or not."""
        for pool in self._plane.pools.values():
            for link in list(pool.links.values()):
                ttl = self._plane.config.shard_ttl_seconds
                if link.register.ttl_ms:
                    ttl = min(ttl, link.register.ttl_ms / 1000)
                if now - link.last_heard > ttl:
                    self._remove(pool, link, f"shard {link.rank} was silent for more than {ttl:g} s")

    def _remove(self, pool: HostedPool, link: ShardLink, reason: str) -> None:
        self._links.pop(link.registration_id, None)
        pool.remove(link, reason)

    def _pool(self, request: registry_pb2.RegisterRequest) -> HostedPool:
        """The pool that a shard joins: the one that is there, or what begins in its place."""
        pool, rank = self._plane.pools.get(request.pool_id), request.shard.rank
        if pool is None or pool.abandoned:
            # Nothing is left of it: a new deployment may bring another model.
            pool = self._plane.new_pool(request)
        _check_agrees(pool, request)
        old = pool.links.get(rank)
        if old is not None and old.boot_id != request.boot_id:
            if old.connected:
                raise AlreadyExistsError(
                    f"rank {rank} of pool {pool.pool_id} is served by boot {old.boot_id}",
                    metadata={"boot_id": str(old.boot_id)},
                )
            if pool.survives_in(request.held_pool):
                return self._begin_again(pool, request, f"shard {rank} has taken its memory up again")
            self._remove(pool, old, f"shard {rank} came back with another boot")
            old = None
        held = request.held_pool.incarnation
        if _followed_another(pool, held, known=old is not None) and pool.core is not None:
            return self._begin_again(pool, request, f"shard {rank} has followed incarnation {held}")
        return pool

    def _begin_again(self, pool: HostedPool, request: registry_pb2.RegisterRequest, reason: str) -> HostedPool:
        """A pool in place of one whose bytes are there and that this control plane knows too little of: its shards dial
        in again, and say what they hold."""
        pool.forget(reason)
        self._links = {number: found for number, found in self._links.items() if found[0] is not pool}
        again = self._plane.new_pool(request)
        again.incarnation, again.pool_epoch = pool.incarnation + 1, pool.pool_epoch
        return again

    def _event(self, pool: HostedPool, link: ShardLink, event: registry_pb2.ShardEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "session_attached":
            process = event.session_attached.process
            session = pool.sessions.get(event.session_attached.session_id)
            key = (link.rank, process.pid, process.start_ticks)
            if session is not None:
                session.processes.add(key)
            elif pool.recovery is not None:
                pool.recovery.attached(key, event.session_attached.session_id)
        elif kind == "process_gone":
            process = event.process_gone.process
            key = (link.rank, process.pid, process.start_ticks)
            if event.process_gone.session_id in pool.sessions:
                process_gone(pool, event.process_gone.session_id, key)
            else:
                pool.process_gone(event.process_gone.session_id, key)
        elif kind == "session_drained":
            drained = event.session_drained
            session_drained(pool, link.rank, drained.session_id, drained.lease_epoch)
        elif kind == "blocks_damaged":
            pool.distrust(f"shard {link.rank} has damaged blocks")
        elif kind == "superseded":
            _log.error("superseded", pool=pool.pool_id, rank=link.rank, incarnation=event.superseded.incarnation)
            close, error = link.close, SupersededError(f"the shard follows {event.superseded.incarnation}")
            pool.stream_lost(link)
            if close is not None:
                close(error)
            # Nor does it renew a lease any more: whoever took over counts them.
            pool.forget(error.message)


def _followed_another(pool: HostedPool, held: int, *, known: bool) -> bool:
    """Whether a shard has followed another start of a control plane since; one that is known has followed this one."""
    return held > pool.incarnation or (held == pool.incarnation and not known)


def _raise_incarnation(pool: HostedPool, request: registry_pb2.RegisterRequest, *, known: bool) -> None:
    """Make sure that a pool's incarnation is above any that the shard has followed."""
    held = request.held_pool.incarnation
    pool.pool_epoch = max(pool.pool_epoch, request.held_pool.pool_epoch)
    if _followed_another(pool, held, known=known):
        pool.incarnation = held + 1


def _check(request: registry_pb2.RegisterRequest) -> None:
    """Refuse what no shard can be."""
    if not request.pool_id:
        raise InvalidArgumentError.of("pool_id", "must not be empty")
    identities.check_name(request.pool_id, "pool_id")
    shard = request.shard
    if not 1 <= shard.world_size <= 256 or shard.rank >= shard.world_size:
        raise InvalidArgumentError.of("shard", f"rank {shard.rank} of {shard.world_size} is impossible")
    if not request.boot_id:
        raise InvalidArgumentError.of("boot_id", "must not be 0")
    if not 2 <= request.max_blocks < 1 << 31:
        raise InvalidArgumentError.of("max_blocks", f"is {request.max_blocks}, must be between 2 and 2^31 - 1")
    if request.held_pool.incarnation >= INCARNATION_MAX:
        raise InvalidArgumentError.of("held_pool.incarnation", f"is not below {INCARNATION_MAX}")
    if request.held_pool.pool_epoch >= EPOCH_MAX:
        raise InvalidArgumentError.of("held_pool.pool_epoch", f"is not below {EPOCH_MAX}")
    if request.ttl_ms > TTL_MS_MAX:
        raise InvalidArgumentError.of("ttl_ms", f"is {request.ttl_ms}, at most {TTL_MS_MAX}")
    if request.directory_version != directory.VERSION:
        raise UnsupportedFeatureError(
            f"directory version {request.directory_version} is not {directory.VERSION}",
            metadata={"feature": "directory_version"},
        )
    missing = [feature for feature in SHARD_FEATURES if feature not in request.features]
    if missing:
        raise UnsupportedFeatureError(f"the shard has not built {missing[0]!r}", metadata={"feature": missing[0]})
    identities.model_identity(request.model, "model")
    identities.group_spec(request.groups, "groups")
    if request.groups[0].block_tokens != request.model.block_tokens:
        raise InvalidArgumentError.of("groups[0].block_tokens", f"must be the model's {request.model.block_tokens}")


def _check_agrees(pool: HostedPool, request: registry_pb2.RegisterRequest) -> None:
    """All shards of a pool are of one model, one layout and one world."""
    template = pool.template
    identities.require_same("model", template.model, request.model)
    identities.require_same("layout", template.layout, request.layout)
    if list(template.groups) != list(request.groups):
        raise IdentityMismatchError("groups differ from the pool's", metadata={"field": "groups"})
    if template.shard.world_size != request.shard.world_size:
        raise IdentityMismatchError(
            f"shard.world_size is {request.shard.world_size}, the pool has {template.shard.world_size}",
            metadata={"field": "shard.world_size"},
        )
