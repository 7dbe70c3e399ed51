"""What a shard announces of itself, from its configuration."""

import secrets
from pathlib import Path

from kvplane.compute.config import ComputeConfig
from kvplane.compute.device import device_of
from kvplane.compute.dtypes import KV_DTYPES, wire_dtype
from kvplane.compute.layout import ROLES, layout_of
from kvplane.compute.state import ShardIdentity
from kvplane.v1 import registry_pb2, types_pb2
from kvplane.wire import directory, stamps
from kvplane.wire.errors import LimitExceededError
from kvplane.wire.features import BUILT
from kvplane.wire.identity import ModelIdentity
from kvplane.wire.packed import pack_u32

FEATURES = frozenset({*BUILT, "seal", "void_rows", "fence", "inventory", "attach", "block_io"})
"""What a control plane and engines may rely on here."""


def identity_of(config: ComputeConfig) -> ShardIdentity:
    """The shard that a configuration describes, with a new boot id. Raises `RuntimeError` for a device that is not
    there."""
    spec = _shard_spec(config)
    group = _group_spec(config)
    order = types_pb2.HEAD_LAYOUT_HND if config.head_layout == "HND" else types_pb2.HEAD_LAYOUT_NHD
    layout = layout_of([group], spec, order, config.interleaved_kv)
    model = ModelIdentity(config.weights_revision, config.tokenizer_revision, config.kv_dtype, config.block_tokens)
    folder = config.memory_folder / f"{config.pool_id.replace('/', '_')}-{config.rank}"
    return ShardIdentity(
        pool_id=config.pool_id,
        boot_id=secrets.randbits(63) | 1,
        model=model,
        groups=(group,),
        spec=spec,
        layout_identity=layout.identity(config.tensor_parallel, config.pipeline_parallel),
        layout=layout,
        folder=folder,
        device=device_of(config),
    )


def _shard_spec(config: ComputeConfig) -> types_pb2.ShardSpec:
    stage, part = divmod(config.rank, config.tensor_parallel)
    heads, world = config.num_kv_heads, config.tensor_parallel
    per_shard = max(1, heads // world)
    first = part * heads // world if heads < world else part * per_shard
    begin, end = (index * config.num_layers // config.pipeline_parallel for index in (stage, stage + 1))
    spec = types_pb2.ShardSpec(
        rank=config.rank,
        world_size=world * config.pipeline_parallel,
        first_kv_head=first,
        num_kv_heads=per_shard,
        replicated=heads < world,
    )
    if config.pipeline_parallel > 1:
        spec.layers.CopyFrom(types_pb2.LayerRange(first=begin, count=end - begin))
    return spec


def _group_spec(config: ComputeConfig) -> types_pb2.GroupSpec:
    dtype = wire_dtype(KV_DTYPES[config.kv_dtype])
    group = types_pb2.GroupSpec(
        block_tokens=config.block_tokens,
        layers=pack_u32(range(config.num_layers)),
        tensors=[
            types_pb2.TensorSpec(
                role=role,
                dtype=dtype,
                shape=[config.num_kv_heads, config.head_dim],
                placement=types_pb2.TENSOR_PLACEMENT_HEAD_SHARDED,
            )
            for role in ROLES
        ],
    )
    if config.window_tokens is None:
        group.full_attention.SetInParent()
    else:
        group.sliding_window.window_tokens = config.window_tokens
    return group


def max_blocks(config: ComputeConfig, identity: ShardIdentity) -> int:
    """Blocks that the budget has room for. Raises `LimitExceededError` for fewer than two."""
    layout, device = identity.layout, identity.device
    budget = config.pool_bytes or int(config.pool_share * device.available_bytes())
    per_block = layout.block_bytes
    if device.is_host:
        # The directory and the stamps lie in the same memory.
        per_block += directory.BLOCK_ROW.itemsize + stamps.stamps_bytes(1) - stamps.stamps_bytes(0)
    fits = budget // (layout.block_bytes if config.pool_bytes else per_block)
    blocks = min(fits, config.max_blocks or fits, (1 << 31) - 1)
    if blocks < 2:
        raise LimitExceededError(
            f"{budget} bytes hold {blocks} blocks of {layout.block_bytes} bytes, a pool has at least 2",
            metadata={"limit": "pool_bytes", "value": str(budget)},
        )
    return blocks


def registration_of(
    config: ComputeConfig, identity: ShardIdentity, address: str, held: registry_pb2.HeldPool | None
) -> registry_pb2.RegisterRequest:
    """What the shard tells the control plane."""
    model = identity.model
    return registry_pb2.RegisterRequest(
        pool_id=identity.pool_id,
        boot_id=identity.boot_id,
        address=address,
        device=registry_pb2.Device(
            kind=identity.device.kind,
            index=identity.device.index,
            name=identity.device.name,
            available_bytes=identity.device.available_bytes(),
            host_id=host_id(),
        ),
        shard=identity.spec,
        model=types_pb2.ModelIdentity(
            weights_revision=model.weights_revision,
            tokenizer_revision=model.tokenizer_revision,
            kv_dtype=model.kv_dtype,
            block_tokens=model.block_tokens,
            hash_version=model.hash_version,
        ),
        layout=identity.layout_identity,
        groups=identity.groups,
        directory_version=directory.VERSION,
        held_pool=held,
        max_blocks=max_blocks(config, identity) if held is None else held.num_blocks,
        ttl_ms=round(1000 * config.ttl_seconds),
        features=sorted(FEATURES),
    )


def host_id() -> str:
    """Identity of this host since it was started; the same for all processes on it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
