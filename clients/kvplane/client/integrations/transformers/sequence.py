"""A sequence of a request as the engine sees it: its tokens, and how far each side is with them."""

import time
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from kvplane.client.integrations.transformers.requests import Completion, FinishedBy, Output, Request, RequestMetrics
from kvplane.client.integrations.transformers.sampling import Sampler
from kvplane.client.integrations.transformers.streaming import TextStream
from kvplane.client.values import HitReason


class Phase(Enum):
    """Where a sequence is."""

    QUEUED = auto()
    """The cache service does not know it yet."""
    WAITING = auto()
    """Known there, holds nothing: not admitted yet, or had to yield."""
    FORKING = auto()
    """Sent as the child of a fork that is not answered."""
    RUNNING = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion. Counts are absolute: tokens from the start of the prompt."""

    group: "RequestGroup"
    index: int
    sampler: Sampler
    tokens: NDArray[np.int64]
    """Token ids; the first `known` count. As long as the sequence may become."""
    known: int
    computed: int = 0
    """Tokens whose KV is in the pool."""
    reported: int = 0
    """Known tokens that the cache service was told."""
    committed: int = 0
    """Computed tokens that the cache service was told."""
    sequence_id: int = 0
    row: int = 0
    phase: Phase = Phase.QUEUED
    text: TextStream | None = None
    finished_by: FinishedBy | None = None

    @property
    def limit(self) -> int:
        """Most tokens it may have."""
        return len(self.tokens)

    @property
    def order(self) -> tuple[int, int, int]:
        """Place among all sequences: by priority, then arrival."""
        return (self.group.request.priority, self.group.request_id, self.index)

    def yielded(self) -> None:
        """Its blocks are gone; what it knows stays."""
        self.phase = Phase.WAITING
        self.computed = self.committed = 0

    def completion(self) -> Completion:
        """What came out of it."""
        tokens = tuple(self.tokens[self.group.prompt_tokens : self.known].tolist())
        return Completion(tokens, self.text.text if self.text else "", self.finished_by or FinishedBy.ABORT)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request with its sequences."""

    request_id: int
    request: Request
    prompt_tokens: int
    stop_tokens: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)
    added: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    hit_reason: HitReason = HitReason.NONE
    preemptions: int = 0

    @property
    def finished(self) -> bool:
        """Whether all completions are."""
        return all(sequence.finished_by is not None for sequence in self.sequences)

    def output(self) -> Output:
        """The finished request."""
        now = time.perf_counter()
        metrics = RequestMetrics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            hit_reason=self.hit_reason,
            queue_seconds=(self.admitted or now) - self.added,
            first_token_seconds=(self.first_token or now) - self.added,
            total_seconds=now - self.added,
            preemptions=self.preemptions,
        )
        return Output(self.request_id, tuple(each.completion() for each in self.sequences), metrics)
