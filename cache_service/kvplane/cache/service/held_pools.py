"""What shards say at their registration that they still hold: sessions, namespaces, and whether it is one pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplane.cache.core import CacheCore
from kvplane.cache.core.sessions import MIN_TTL_SECONDS
from kvplane.cache.service import identities
from kvplane.cache.service.shards import ShardLink
from kvplane.v1 import registry_pb2, types_pb2
from kvplane.wire.identity import Namespace

_UNUSED_SALT = b"\0" * 65
"""Longer than any salt of a client: stands for a namespace that no shard has stored."""


@dataclass(slots=True)
class KnownSession:
    """A session that shards have served before the restart."""

    session_id: int
    lease_epoch: int = 0
    tenant_id: str = ""
    ttl_seconds: float = MIN_TTL_SECONDS
    mode: "types_pb2.SessionMode.ValueType" = types_pb2.SESSION_MODE_REMOTE
    last_grant: int = 0
    fenced: bool = False
    processes: set[tuple[int, int, int]] = field(default_factory=set)
    """Attached processes: (shard rank, process id, start ticks)."""
    had_processes: bool = False
    deadline: float = 0.0

    @property
    def gone(self) -> bool:
        """Whether nobody can come back for it."""
        return self.fenced or (self.had_processes and not self.processes)


def recoverable(links: Sequence[ShardLink]) -> bool:
    """Whether all shards still hold the same pool."""
    held = [link.register.held_pool for link in links]
    model = identities.model_identity(links[0].register.model, "model").encode()
    return all(
        link.register.HasField("held_pool")
        and (mine.pool_epoch, mine.num_blocks, mine.model_identity) == (held[0].pool_epoch, held[0].num_blocks, model)
        for link, mine in zip(links, held, strict=True)
    ) and bool(held[0].pool_epoch)


def known_sessions(held: Sequence[registry_pb2.HeldPool]) -> dict[int, KnownSession]:
    """The sessions of all shards, each as the shard with its newest lease knows it."""
    known: dict[int, KnownSession] = {}
    for rank, pool in enumerate(held):
        for served in pool.sessions:
            found = known.setdefault(served.session_id, KnownSession(served.session_id))
            if served.lease_epoch >= found.lease_epoch:
                found.lease_epoch, found.tenant_id, found.mode = served.lease_epoch, served.tenant_id, served.mode
            found.ttl_seconds = max(found.ttl_seconds, served.ttl_ms / 1000)
            found.last_grant = max(found.last_grant, served.last_grant)
            found.fenced |= served.fenced
            found.processes |= {(rank, each.pid, each.start_ticks) for each in served.processes}
            found.had_processes = bool(found.processes)
    return known


def restore_namespaces(core: CacheCore, held: Sequence[registry_pb2.HeldPool]) -> list[str]:
    """Register what the shards have stored, each at its highest version; returns the namespaces' tenants by id."""
    rows: dict[int, registry_pb2.NamespaceRow] = {}
    for pool in held:
        for row in pool.namespaces:
            if row.namespace_id not in rows or rows[row.namespace_id].version < row.version:
                rows[row.namespace_id] = row
    namespaces, tenants = [(Namespace(), 0)], [""]
    for namespace_id in range(max(rows, default=0) + 1):
        row = rows.get(namespace_id, registry_pb2.NamespaceRow())
        try:
            found = Namespace.decode(row.identity)
        except ValueError:
            found = Namespace(sub_salt=_UNUSED_SALT + namespace_id.to_bytes(4, "little"))
        if namespace_id == 0:
            namespaces[0] = (Namespace(), row.version)
        else:
            namespaces.append((found, row.version))
            tenants.append(row.tenant_id)
    core.restore_namespaces(namespaces)
    return tenants
