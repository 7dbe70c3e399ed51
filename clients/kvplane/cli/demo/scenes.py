"""The demo's scenes: each does one thing with real processes and returns what was seen."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvplane.cli.child import Child
from kvplane.cli.demo import prompts
from kvplane.cli.demo.lines import hear, tell
from kvplane.cli.pair import RunningPair
from kvplane.v1 import types_pb2
from kvplane.wire.errors import DataLossError, DeadlineExceededError

MAX_NEW_TOKENS = 24
LONG_ANSWER_TOKENS = 64
KILL_AFTER_TOKENS = 16
"""Tokens of the long answer before the cache service is killed."""

SETTLE_SECONDS = 15.0
"""How long the pool may take to be free of a dead engine's blocks."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain transformers answers to a question."""

    prompt: list[int]
    token_ids: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered, and what the pool saved it."""

    engine: str
    prompt_tokens: int
    cached_tokens: int
    hit_reason: str
    first_token_seconds: float
    total_seconds: float
    longest_pause_seconds: float
    """Between two of its tokens."""
    text: str
    equal: bool
    """Token by token what plain transformers answers."""


def references(pair: RunningPair, model: str, questions: dict[str, int], say: OnProgress) -> dict[str, Reference]:
    """Plain transformers' answers to the questions, with so many tokens each."""
    child = pair.spawn("reference", "kvplane.cli.demo.reference", [model], pipes=True)
    say("plain transformers loads the model")
    while hear(child, "ready", "progress")["event"] != "ready":
        pass
    found = {}
    for name, count in questions.items():
        say(f"plain transformers answers question {name}")
        tell(child, messages=prompts.conversation(prompts.QUESTIONS[name]), max_new_tokens=count)
        answer = hear(child, "answer")
        found[name] = Reference(answer["prompt"], answer["token_ids"], answer["seconds"])
    child.stop()
    return found


def start_engine(pair: RunningPair, name: str, model: str, say: OnProgress) -> Child:
    """An engine process that has loaded the model and opened a session."""
    say(f"engine {name} loads the model")
    child = pair.spawn(f"engine {name}", "kvplane.cli.demo.engine", [name, model], pipes=True)
    hear(child, "ready")
    return child


def ask(
    child: Child, name: str, reference: Reference, say: OnProgress, on_token: Callable[[int], None] = lambda _: None
) -> Answer:
    """Have an engine answer a question; `on_token` is called with the number of tokens so far."""
    count = len(reference.token_ids)
    say(f"{child.name} answers question {name}")
    tell(child, prompt=reference.prompt, max_new_tokens=count)
    seen, last, pause = 0, None, 0.0
    while True:
        message = hear(child, "tokens", "done")
        if message["event"] == "done":
            break
        seen += len(message["token_ids"])
        pause = max(pause, message["time"] - last) if last is not None else 0.0
        last = message["time"]
        on_token(seen)
    return Answer(
        child.name,
        message["prompt_tokens"],
        message["cached_tokens"],
        message["hit_reason"],
        message["first_token_seconds"],
        message["total_seconds"],
        pause,
        message["text"],
        list(message["token_ids"]) == reference.token_ids,
    )


def settled(pair: RunningPair) -> types_pb2.Pool:
    """The pool once nobody holds anything. Raises `DeadlineExceededError`; `DataLossError` when blocks are missing."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        pool = pair.pool()
        stats = pool.stats
        if pool.state == types_pb2.POOL_STATE_READY and not stats.held_blocks and not stats.quarantined_blocks:
            break
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"{stats.held_blocks} blocks are held, {stats.quarantined_blocks} quarantined after all engines ended"
            )
        time.sleep(0.1)
    if stats.free_blocks + stats.cached_blocks != pool.num_blocks - 1:
        raise DataLossError(f"{stats.free_blocks} free and {stats.cached_blocks} cached are not {pool.num_blocks - 1}")
    return pool
