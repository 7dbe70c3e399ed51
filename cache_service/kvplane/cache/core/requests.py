"""What goes into a step: one value per operation, lists of sequences as parallel arrays.

A step is applied in the order of `Step`'s fields. A sequence is named at most once per operation, and one
named in `advance` in none of observe, commit, rollback, finish and extend of the same step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from kvplane.cache.core.arrays import U32, U64
from kvplane.cache.core.chains import Chain
from kvplane.wire.digests import ExtraKey


class FinishReason(IntEnum):
    """Why a sequence ends; the core treats them alike and counts them apart."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class TransferAck:
    """A copy, named by its `op_id`, has completed on the device, or failed there."""

    op_id: int
    succeeded: bool = True


@dataclass(frozen=True, slots=True)
class Observe:
    """Token ids that became known (sampled): `counts[i]` of `tokens` belong to `sequence_ids[i]`."""

    sequence_ids: U64
    counts: U32
    tokens: U32


@dataclass(frozen=True, slots=True)
class Lengths:
    """An absolute number of tokens or slots per sequence: what commit, rollback and extend carry."""

    sequence_ids: U64
    num_tokens: U32


@dataclass(frozen=True, slots=True)
class Fork:
    """New sequences that continue `parent_id` from all it has committed and knows."""

    parent_id: int
    child_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Sequences that end, children before parents; `reasons` are values of `FinishReason`."""

    sequence_ids: U64
    reasons: U32


@dataclass(frozen=True, slots=True)
class Advance:
    """Steady decode, one row per sequence: observe one token, commit and extend to absolute lengths."""

    sequence_ids: U64
    tokens: U32
    num_committed: U32
    num_slots: U32


@dataclass(frozen=True, slots=True)
class Admit:
    """A request to run a sequence: a new one with its tokens, or one refused or preempted, by id alone.

    For a known sequence only `sequence_id`, `num_slots` and `max_chunk_tokens` are read.
    """

    sequence_id: int
    tokens: bytes = b""
    """The prompt, packed little-endian u32; empty for a sequence that is known already."""
    namespace_id: int = 0
    num_slots: int = 0
    """Slots of the first chunk, hits included; 0 asks for the whole prompt."""
    read_cache: bool = True
    write_cache: bool = True
    max_hit_tokens: int | None = None
    chain: Chain | None = None
    """What `CacheCore.hash_prompt` made of `tokens` before the step; the rest is hashed at the admission."""
    extra_keys: Mapping[int, tuple[ExtraKey, ...]] = field(default_factory=dict)
    """Keys by block index: what the block's KV depends on besides its tokens."""
    priority: int = 0
    """Class of the request: a higher number yields earlier, as in the engines."""
    arrival_rank: int | None = None
    """Order of arrival among all sequences of the pool; None: the order in which they were first named."""
    max_chunk_tokens: int | None = None
    """Most tokens to compute in the first chunk, net of hits."""


@dataclass(frozen=True, slots=True)
class Step:
    """Everything a scheduler iteration needs, in the order in which it is applied."""

    step_id: int
    last_seen_step: int = 0
    """Newest step whose response the sender had read when it sent this one."""
    completed_step: int = 0
    """Newest step whose work has completed on the device, the minimum over the session's ranks."""
    transfers: tuple[TransferAck, ...] = ()
    drained: tuple[int, ...] = ()
    """Revoked sequences on whose blocks nothing of this session runs any more."""
    observe: Observe | None = None
    commit: Lengths | None = None
    rollback: Lengths | None = None
    forks: tuple[Fork, ...] = ()
    finish: Finish | None = None
    extend: Lengths | None = None
    advance: Advance | None = None
    """Its tokens and commits are applied before rollback, its slots with extend."""
    admit: tuple[Admit, ...] = ()
    max_admissions: int | None = None
    max_admitted_tokens: int | None = None
    """Budget for tokens to compute (slots net of hits) over all admissions of the step."""
