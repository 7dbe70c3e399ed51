"""What is asked of the engine, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvplane.client.values import HitReason
from kvplane.wire.errors import InvalidArgumentError


class FinishedBy(Enum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token or the end-of-sequence token was sampled, or a stop string appeared."""
    LENGTH = "length"
    """`max_new_tokens`, or the longest sequence that model and pool allow."""
    ABORT = "abort"
    """`Engine.abort`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when they end. The default is greedy.

    Raises `InvalidArgumentError` that names the field.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0: the most likely token."""
    top_k: int = 0
    """Only the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens whose probabilities sum up to p."""
    seed: int = 0
    """Completion i of a request draws from the generator of (seed, i): the same request gives the same tokens."""
    n: int = 1
    """Completions; the prompt is computed once."""
    stop_strings: tuple[str, ...] = ()
    """The text ends before the first of them."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Go on behind the model's end-of-sequence tokens."""

    def __post_init__(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "not negative"),
            ("top_k", self.top_k >= 0, "not negative"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("seed", self.seed >= 0, "not negative"),
            ("n", 1 <= self.n <= 1024, "between 1 and 1,024"),
            ("stop_strings", all(self.stop_strings), "not empty"),
        )
        for name, good, allowed in checks:
            if not good:
                raise InvalidArgumentError.of(f"sampling.{name}", f"must be {allowed}, is {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what is wanted of it."""

    prompt: str | Sequence[int]
    """Text, or token ids."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """A lower number is more important: admitted earlier, preempted later."""
    namespace_id: int = 0
    """Namespace in which prefixes are shared (`Session.register_namespace`); 0 is the session's own."""
    read_cache: bool = True
    write_cache: bool = True
    name: str = ""
    """For logs of the cache service."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's time went. Seconds are counted from `Engine.add`."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the pool already."""
    hit_reason: HitReason
    """Why the hit ended there."""
    queue_seconds: float
    """Until it was admitted."""
    first_token_seconds: float
    """Until its first token was sampled."""
    total_seconds: float
    preemptions: int
    """How often one of its sequences had to yield, to this session or another."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the `n` answers."""

    token_ids: tuple[int, ...]
    """Sampled tokens, a stop token included."""
    text: str
    """Without special tokens, and without what a stop string cut off; empty without a tokenizer."""
    finished_by: FinishedBy


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request."""

    request_id: int
    completions: tuple[Completion, ...]
    metrics: RequestMetrics

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first completion."""
        return self.completions[0].token_ids


@dataclass(frozen=True, slots=True)
class Event:
    """What a step brought for one completion."""

    request_id: int
    index: int
    """Which of the `n` completions."""
    token_ids: tuple[int, ...]
    """New tokens."""
    text: str
    """New text; behind the tokens while a character is incomplete or may become a stop string."""
    finished_by: FinishedBy | None = None
    output: Output | None = None
    """With the last event of a request."""
