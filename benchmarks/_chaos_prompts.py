"""Prompts of a chaos run: a few prefixes that all engines share, in two namespaces, with endings of their own."""

import random

SUB_SALTS = {"": b"", "other": b"other"}
"""Namespaces by name: the same tokens have other bytes in each."""

VOCABULARY = 1000
BLOCK_TOKENS = 8


def prefixes(seed: int, count: int = 6) -> list[list[int]]:
    """Token ids that prompts begin with; some begin alike, so that chains branch."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for index in range(count):
        head = made[-1][: 3 * BLOCK_TOKENS] if index % 2 else []
        made.append(head + [rng.randrange(VOCABULARY) for _ in range(rng.randint(30, 90) - len(head))])
    return made


def draw(rng: random.Random, shared: list[list[int]]) -> tuple[str, list[int]]:
    """Namespace and tokens of a prompt."""
    head = rng.choice(shared)
    # Mostly whole, at times cut somewhere: hits end at any block then.
    if rng.random() < 0.3:
        head = head[: rng.randint(1, len(head))]
    namespace = rng.choice(list(SUB_SALTS))
    return namespace, head + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 24))]
