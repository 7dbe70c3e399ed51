"""For every RPC of the contract: who implements it, or that nobody does yet.

`servicer`, `client` and `twin` are `module:Class.method`. The twin is the same call without a socket; RPCs of
compute services have none. A client of None says that nobody of ours calls the RPC yet.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Built:
    """An RPC that works."""

    servicer: str
    client: str | None
    twin: str | None = None


@dataclass(frozen=True, slots=True)
class CallerOnly:
    """An RPC that ours calls and none of ours serves yet: it answers UNIMPLEMENTED."""

    client: str


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """An RPC that answers UNIMPLEMENTED."""


NOT_BUILT = NotBuilt()

RPCS: dict[str, Built | CallerOnly | NotBuilt] = {
    "kvplane.v1.CacheAdminService/DeleteTenant": NOT_BUILT,
    "kvplane.v1.CacheAdminService/DrainPool": NOT_BUILT,
    "kvplane.v1.CacheAdminService/EndSession": NOT_BUILT,
    "kvplane.v1.CacheAdminService/GetTenant": NOT_BUILT,
    "kvplane.v1.CacheAdminService/ListSessions": NOT_BUILT,
    "kvplane.v1.CacheAdminService/ListTenants": NOT_BUILT,
    "kvplane.v1.CacheAdminService/PutTenant": NOT_BUILT,
    "kvplane.v1.CacheAdminService/RemovePrefix": NOT_BUILT,
    "kvplane.v1.CacheAdminService/ResetCache": NOT_BUILT,
    "kvplane.v1.CacheAdminService/ResizePool": NOT_BUILT,
    "kvplane.v1.CacheAdminService/UpdateWeights": NOT_BUILT,
    "kvplane.v1.CacheService/CloseSession": Built(
        "kvplane.cache.service.servicers:CacheServicer.CloseSession",
        "kvplane.client.control:GrpcCacheControl.close_session",
        "kvplane.cache.twin:InProcessCacheControl.close_session",
    ),
    "kvplane.v1.CacheService/Explain": NOT_BUILT,
    "kvplane.v1.CacheService/Export": NOT_BUILT,
    "kvplane.v1.CacheService/GetPool": Built(
        "kvplane.cache.service.servicers:CacheServicer.GetPool",
        "kvplane.client.control:GrpcCacheControl.get_pool",
        "kvplane.cache.twin:InProcessCacheControl.get_pool",
    ),
    "kvplane.v1.CacheService/Heartbeat": Built(
        "kvplane.cache.service.servicers:CacheServicer.Heartbeat",
        "kvplane.client.control:GrpcCacheControl.heartbeat",
        "kvplane.cache.twin:InProcessCacheControl.heartbeat",
    ),
    "kvplane.v1.CacheService/ListPools": Built(
        "kvplane.cache.service.servicers:CacheServicer.ListPools",
        "kvplane.client.control:GrpcCacheControl.list_pools",
        "kvplane.cache.twin:InProcessCacheControl.list_pools",
    ),
    "kvplane.v1.CacheService/Lookup": Built(
        "kvplane.cache.service.servicers:CacheServicer.Lookup",
        "kvplane.client.control:GrpcCacheControl.lookup",
        "kvplane.cache.twin:InProcessCacheControl.lookup",
    ),
    "kvplane.v1.CacheService/OpenSession": Built(
        "kvplane.cache.service.servicers:CacheServicer.OpenSession",
        "kvplane.client.control:GrpcCacheControl.open_session",
        "kvplane.cache.twin:InProcessCacheControl.open_session",
    ),
    "kvplane.v1.CacheService/RegisterNamespace": Built(
        "kvplane.cache.service.servicers:CacheServicer.RegisterNamespace",
        "kvplane.client.control:GrpcCacheControl.register_namespace",
        "kvplane.cache.twin:InProcessCacheControl.register_namespace",
    ),
    "kvplane.v1.CacheService/ReleaseOperation": NOT_BUILT,
    "kvplane.v1.CacheService/RenewOperation": NOT_BUILT,
    "kvplane.v1.CacheService/Step": Built(
        "kvplane.cache.service.servicers:CacheServicer.Step",
        "kvplane.client.control:GrpcCacheControl.step",
        "kvplane.cache.twin:InProcessCacheControl.step",
    ),
    "kvplane.v1.CacheService/WatchEvents": NOT_BUILT,
    "kvplane.v1.ComputeService/Attach": Built(
        "kvplane.compute.servicers:ComputeServicer.Attach", "kvplane.client.compute.attach_socket:attach"
    ),
    "kvplane.v1.ComputeService/Execute": Built(
        "kvplane.compute.servicers:ComputeServicer.Execute", "kvplane.client.compute.stream:ShardStream.__init__"
    ),
    "kvplane.v1.ComputeService/GetShard": Built("kvplane.compute.servicers:ComputeServicer.GetShard", None),
    "kvplane.v1.ComputeService/ReadBlocks": Built("kvplane.compute.servicers:ComputeServicer.ReadBlocks", None),
    "kvplane.v1.ComputeService/WriteBlocks": Built("kvplane.compute.servicers:ComputeServicer.WriteBlocks", None),
    "kvplane.v1.PoolRegistryService/Control": Built(
        "kvplane.cache.service.servicers:RegistryServicer.Control", "kvplane.compute.control:ControlClient._follow"
    ),
    "kvplane.v1.PoolRegistryService/Inventory": Built(
        "kvplane.cache.service.servicers:RegistryServicer.Inventory", "kvplane.compute.control:ControlClient._upload"
    ),
    "kvplane.v1.PoolRegistryService/Register": Built(
        "kvplane.cache.service.servicers:RegistryServicer.Register", "kvplane.compute.control:ControlClient._follow"
    ),
}
