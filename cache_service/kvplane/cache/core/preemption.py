"""Who yields when eviction is not enough: the policy's protocol and the engines' rule."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvplane.cache.core.arrays import I64, U64


@dataclass(frozen=True, slots=True)
class RunningSequences:
    """Read-only snapshot of the running sequences of a pool; parallel arrays."""

    sequence_ids: U64
    session_ids: I64
    priority: I64
    """Class: a higher number yields earlier."""
    arrival: I64
    """Order of arrival."""
    committed_tokens: I64
    requester: int
    """Index of the sequence that needs blocks; the policy may choose it."""

    def __len__(self) -> int:
        return len(self.sequence_ids)


class PreemptionPolicy(Protocol):
    """Chooses victims; mechanism carries the choice out and explains it."""

    rule: str
    """Name of the rule, for explanations."""

    def victim(self, running: RunningSequences) -> int:
        """Index of the sequence that yields."""
        ...


class LatestArrival:
    """The least important class yields first, in it the latest arrival: the engines' own rule."""

    rule = "lowest priority class, then latest arrival"

    def victim(self, running: RunningSequences) -> int:
        """The last sequence in the order (priority, arrival, sequence id)."""
        return int(np.lexsort((running.sequence_ids, running.arrival, running.priority))[-1])
