"""Sessions: an engine's lease and what the core remembers of it. Time is an argument, in seconds."""

from dataclasses import dataclass, field

from kvplane.cache.core.arrays import I64, NO_I64
from kvplane.cache.core.ledger import StepLedger
from kvplane.cache.core.quiescence import DeferredReleases
from kvplane.cache.core.results import StepResult

MIN_TTL_SECONDS = 2.0
MAX_TTL_SECONDS = 300.0
DEFAULT_TTL_SECONDS = 10.0


@dataclass(slots=True)
class Session:
    """One engine. Its rows are `first_row` to `first_row + max_sequences - 1` of the columns."""

    session_id: int
    first_row: int
    max_sequences: int
    ttl_seconds: float
    expires_at: float
    deferred: DeferredReleases
    ledger: StepLedger[StepResult] = field(default_factory=StepLedger)
    ended: bool = False
    """The lease is over; its references stay deferred until every shard has seen it gone."""
    layout: int = 0
    """Rises whenever a row of the session starts or stops running."""
    decode_layout: int = -1
    """`layout` at which `decode_ids` was last found to name running sequences, each once."""
    decode_ids: bytes = b""
    decode_rows: I64 = field(default_factory=NO_I64.copy)
    """Rows of `decode_ids` in the session's window, and in the columns."""
    decode_absolute: I64 = field(default_factory=NO_I64.copy)

    def renew(self, now: float) -> None:
        """A message arrived: only messages renew a lease (I8)."""
        self.expires_at = now + self.ttl_seconds
