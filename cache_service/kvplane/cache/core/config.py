"""What a pool is configured with, fixed for its life."""

from dataclasses import dataclass, field

from kvplane.cache.core.groups import FullAttention, GroupSpec
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.identity import ModelIdentity


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Sizes and rules of one pool.

    Raises `InvalidArgumentError` naming the field when a value is out of range.
    """

    num_blocks: int
    """Blocks of the pool, the null block 0 included."""
    model: ModelIdentity
    incarnation: int = 1
    """Start of the control plane, u32: the high half of every generation handed out."""
    group: GroupSpec = field(default_factory=FullAttention)
    prefix_caching: bool = True
    """Off: nothing is hashed, sealed or looked up."""
    watermark: float = 0.02
    """Share of the pool that an admission must leave free while anything runs."""
    max_sequence_tokens: int = 1 << 20
    max_new_blocks_per_sequence: int = 1024
    """Per step; a larger chunk goes on in the next one."""
    writer_patience_seconds: float = 2.0
    """How long a request waits for a prefix whose writer makes no progress before it writes it itself."""
    max_bypasses: int = 64
    """Admissions that may pass a request that does not fit before everything else has to wait for it."""

    def __post_init__(self) -> None:
        checks = (
            ("num_blocks", 2 <= self.num_blocks < 1 << 31, "between 2 and 2^31 - 1"),
            ("incarnation", 1 <= self.incarnation < 1 << 32, "a u32 above 0"),
            ("watermark", 0.0 <= self.watermark < 1.0, "in [0, 1)"),
            ("max_sequence_tokens", 1 <= self.max_sequence_tokens < 1 << 31, "between 1 and 2^31 - 1"),
            ("max_new_blocks_per_sequence", self.max_new_blocks_per_sequence >= 1, "at least 1"),
            ("model.block_tokens", 1 <= self.model.block_tokens <= 1 << 16, "between 1 and 65536"),
            ("writer_patience_seconds", self.writer_patience_seconds >= 0, "not negative"),
            ("max_bypasses", self.max_bypasses >= 0, "not negative"),
        )
        for name, good, allowed in checks:
            if not good:
                raise InvalidArgumentError.of(name, f"must be {allowed}")

    @property
    def block_tokens(self) -> int:
        """Token slots of a block."""
        return self.model.block_tokens

    @property
    def watermark_blocks(self) -> int:
        """The watermark in blocks, rounded down as a share of all blocks."""
        return int(self.watermark * self.num_blocks)
