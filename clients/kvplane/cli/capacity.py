"""How far a memory budget goes: bytes per token, block and sequence, blocks and sequences that fit.

Pure arithmetic, the same as the compute service's own (`kvplane.compute.layout`, `.identity`): a test compares them.
Where nothing else is said a number is for one shard, that is for one compute service.
"""

from dataclasses import dataclass

from kvplane.cli.model import KV_DTYPES, LayerGroup, ModelShape
from kvplane.wire.directory import BLOCK_ROW, DirectorySpec
from kvplane.wire.errors import InvalidArgumentError, LimitExceededError
from kvplane.wire.identity import ModelIdentity
from kvplane.wire.limits import BLOCK_TOKENS_MAX
from kvplane.wire.stamps import stamps_bytes

TENSORS = 2
"""Keys and values."""

TENSOR_ALIGNMENT = 4096
"""Bytes that every tensor's base is a multiple of."""

NUM_BLOCKS_MAX = 2**31 - 1

NULL_BLOCKS = 1
"""Blocks of a pool that nobody gets."""

WATERMARK = 0.02
"""Share of a pool that the cache service leaves free when it admits a further sequence, unless configured."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """How a model's KV cache is stored and split."""

    kv_dtype: str
    block_tokens: int = 16
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def num_shards(self) -> int:
        """Compute services of the pool."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one compute service holds."""

    rank: int
    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int
    replicated: bool
    """Whether other shards hold the same heads as well."""
    block_bytes: int
    """One block: all layers and heads held here, keys and values."""
    tensor_bytes: int
    """All block tensors."""
    bookkeeping_bytes: int
    """Block directory and stamps beside them."""

    @property
    def total_bytes(self) -> int:
        """Shared memory that the shard takes."""
        return self.tensor_bytes + self.bookkeeping_bytes


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence of a given length, computed up to its last token."""

    num_tokens: int
    num_blocks: int
    num_bytes: int
    """Over all shards."""
    unused_slots: int
    """Slots of its last block without a token."""
    fit: int
    """Sequences of this length, sharing nothing, that the cache service admits side by side."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A pool that a budget makes."""

    shape: ModelShape
    deployment: Deployment
    pool_bytes: int
    """Budget for each shard's block tensors."""
    num_blocks: int
    """The null block included; the same on every shard."""
    shards: tuple[ShardPlan, ...]

    @property
    def token_bytes(self) -> int:
        """One token, all layers, every head once."""
        return token_bytes(self.shape, self.deployment.kv_dtype)

    @property
    def block_bytes(self) -> int:
        """One block over all shards, with every copy of replicated heads."""
        return sum(shard.block_bytes for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens that all usable blocks have slots for."""
        return (self.num_blocks - NULL_BLOCKS) * self.deployment.block_tokens

    @property
    def max_unused_slots(self) -> int:
        """Most slots without a token that a sequence can have in its group: all but one of its last block."""
        return self.deployment.block_tokens - 1

    def sequence(self, num_tokens: int) -> SequencePlan:
        """What a sequence of this length takes. Raises `InvalidArgumentError` for a length below 1."""
        if num_tokens < 1:
            raise InvalidArgumentError.of("length", f"is {num_tokens}, must be at least 1")
        size = self.deployment.block_tokens
        blocks = sequence_blocks(num_tokens, size, self.shape.window_tokens)
        usable = self.num_blocks - NULL_BLOCKS
        # The first sequence may take the watermark too.
        fit = max((usable - int(WATERMARK * self.num_blocks)) // blocks, int(usable >= blocks))
        return SequencePlan(num_tokens, blocks, blocks * self.block_bytes, -num_tokens % size, fit)


def plan(shape: ModelShape, deployment: Deployment, pool_bytes: int) -> CapacityPlan:
    """The pool that a compute service makes of `pool_bytes` for block tensors on every shard.

    Raises `InvalidArgumentError` for a format, block size or split that is refused, `LimitExceededError` when the
    budget holds no pool.
    """
    check(shape, deployment)
    parts = [_part(shape, deployment, rank) for rank in range(deployment.num_shards)]
    sizes = [_block_bytes(shape, deployment, len(layers), heads) for layers, _, heads in parts]
    num_blocks = min(pool_bytes // max(sizes), NUM_BLOCKS_MAX)
    if num_blocks < 2:
        raise LimitExceededError(
            f"{pool_bytes} bytes hold {num_blocks} blocks of {max(sizes)} bytes, a pool has at least 2",
            metadata={"limit": "memory", "value": str(pool_bytes), "hint": f"give it {2 * max(sizes)} bytes or more"},
        )
    shards = tuple(
        ShardPlan(
            rank=rank,
            first_layer=layers.start,
            num_layers=len(layers),
            first_kv_head=first,
            num_kv_heads=heads,
            replicated=shape.num_kv_heads < deployment.tensor_parallel,
            block_bytes=size,
            tensor_bytes=_tensor_bytes(size, len(layers), num_blocks),
            bookkeeping_bytes=_bookkeeping_bytes(deployment, num_blocks),
        )
        for rank, ((layers, first, heads), size) in enumerate(zip(parts, sizes, strict=True))
    )
    return CapacityPlan(shape, deployment, pool_bytes, num_blocks, shards)


def check(shape: ModelShape, deployment: Deployment) -> None:
    """Raises `InvalidArgumentError` for what a compute service refuses."""
    if deployment.kv_dtype not in KV_DTYPES:
        raise InvalidArgumentError.of("kv_dtype", f"{deployment.kv_dtype} is none of {', '.join(KV_DTYPES)}")
    size = deployment.block_tokens
    if not 1 <= size <= BLOCK_TOKENS_MAX or size & (size - 1):
        raise InvalidArgumentError.of("block_tokens", f"{size} is no power of two from 1 to {BLOCK_TOKENS_MAX}")
    if not 16 <= shape.head_dim <= 256 or shape.head_dim % 16:
        raise InvalidArgumentError.of("head_dim", f"{shape.head_dim} is no multiple of 16 from 16 to 256")
    heads, split = shape.num_kv_heads, deployment.tensor_parallel
    if split < 1 or max(heads, split) % min(heads, split):
        raise InvalidArgumentError.of("tensor_parallel", f"{split} does not split {heads} KV heads")
    if not 1 <= deployment.pipeline_parallel <= shape.num_layers:
        raise InvalidArgumentError.of(
            "pipeline_parallel", f"{deployment.pipeline_parallel} stages for {shape.num_layers} layers"
        )


def pool_bytes_of_budget(shape: ModelShape, deployment: Deployment, budget_bytes: int) -> int:
    """The part of a shard's whole budget that is left for block tensors beside directory rows and stamps, as a compute
    service splits its share of the free memory."""
    check(shape, deployment)
    parts = [_part(shape, deployment, rank) for rank in range(deployment.num_shards)]
    size = max(_block_bytes(shape, deployment, len(layers), heads) for layers, _, heads in parts)
    return budget_bytes // (size + BLOCK_ROW.itemsize + stamps_bytes(1) - stamps_bytes(0)) * size


def token_bytes(shape: ModelShape, kv_dtype: str) -> int:
    """Keys and values of one token in all layers, every head once."""
    return sum(group_token_bytes(shape, group, kv_dtype) for group in shape.groups)


def group_token_bytes(shape: ModelShape, group: LayerGroup, kv_dtype: str) -> int:
    """Keys and values of one token in one group's layers."""
    return group.num_layers * TENSORS * shape.num_kv_heads * shape.head_dim * KV_DTYPES[kv_dtype]


def sequence_blocks(num_tokens: int, block_tokens: int, window_tokens: int | None = None) -> int:
    """Blocks that a sequence of this many tokens holds. With a window: at most at any one time while it decodes, when
    the last window - 1 tokens begin anywhere in their first block."""
    whole = -(-num_tokens // block_tokens)
    return whole if window_tokens is None else min(whole, -(-(window_tokens - 1) // block_tokens) + 1)


def unused_share(reserved_slots: int, num_tokens: int) -> float:
    """Share of reserved slots that hold no token: what reserving for the longest possible sequence costs."""
    return 1 - num_tokens / reserved_slots


def _part(shape: ModelShape, deployment: Deployment, rank: int) -> tuple[range, int, int]:
    """Layers, first KV head and number of KV heads of a shard."""
    stage, part = divmod(rank, deployment.tensor_parallel)
    heads, split = shape.num_kv_heads, deployment.tensor_parallel
    held = max(1, heads // split)
    begin, end = (index * shape.num_layers // deployment.pipeline_parallel for index in (stage, stage + 1))
    return range(begin, end), part * heads // split, held


def _block_bytes(shape: ModelShape, deployment: Deployment, num_layers: int, num_kv_heads: int) -> int:
    slot = num_kv_heads * shape.head_dim * KV_DTYPES[deployment.kv_dtype]
    return num_layers * TENSORS * deployment.block_tokens * slot


def _tensor_bytes(block_bytes: int, num_layers: int, num_blocks: int) -> int:
    tensors = num_layers * TENSORS
    one = num_blocks * block_bytes // tensors
    return tensors * (-(-one // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT)


def _bookkeeping_bytes(deployment: Deployment, num_blocks: int) -> int:
    model = ModelIdentity("", "", deployment.kv_dtype, deployment.block_tokens)
    spec = DirectorySpec(num_blocks, deployment.block_tokens, model, pool_epoch=0, boot_id=0, incarnation=0)
    return spec.num_bytes + stamps_bytes(num_blocks)
