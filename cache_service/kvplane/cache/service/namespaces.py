"""Namespaces: registered once, stored by every shard."""

from kvplane.cache.core import CacheCore
from kvplane.cache.service.bounds import check_limit
from kvplane.cache.service.pools import HostedPool, namespace_row
from kvplane.cache.service.shards import Broadcast
from kvplane.v1 import registry_pb2
from kvplane.wire.identity import Namespace


def register(core: CacheCore, namespace: Namespace, limit: int) -> int:
    """The core's id of a namespace. Raises `LimitExceededError`, and has added none then."""
    if namespace not in core.state.namespaces:
        check_limit("namespaces", len(core.state.namespaces), limit)
    return core.register_namespace(namespace)


def put(pool: HostedPool, namespace_id: int, tenant_id: str) -> Broadcast:
    """Have every shard store a namespace."""
    command = registry_pb2.PutNamespaces(namespaces=[namespace_row(pool.open_core(), namespace_id, tenant_id)])
    return Broadcast(pool.links.values(), registry_pb2.ControlResponse(put_namespaces=command))
