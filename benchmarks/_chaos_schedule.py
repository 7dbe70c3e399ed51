"""What is to happen in a chaos run, drawn from its seed before anything runs: the same seed, the same faults."""

import random
from dataclasses import dataclass

from _chaos_world import ENGINES, NUM_SHARDS, TTL_SECONDS

SHARDS = [f"shard-{rank}" for rank in range(NUM_SHARDS)]

_SHORT = (0.2, TTL_SECONDS / 2)
_LONG = (TTL_SECONDS + 1.0, TTL_SECONDS + 2.5)

KINDS: dict[str, tuple[int, tuple[str, ...], tuple[float, float]]] = {
    # kind: weight, targets, seconds that it lasts (or that the part is down)
    "cache killed": (6, ("cache",), (0.0, 1.0)),
    "cache killed, prefixes compared": (6, ("cache",), (0.0, 1.0)),
    "cache and shard killed, prefixes compared": (3, ("cache",), (0.0, 0.5)),
    "cache restarted": (3, ("cache",), (0.0, 0.5)),
    "cache stopped": (4, ("cache",), _SHORT),
    "cache stopped beyond the ttl": (2, ("cache",), _LONG),
    "shard killed": (3, tuple(SHARDS), (0.0, 1.0)),
    "shard restarted": (2, tuple(SHARDS), (0.0, 0.5)),
    "shard stopped": (4, tuple(SHARDS), _SHORT),
    "shard stopped beyond the ttl": (2, tuple(SHARDS), _LONG),
    "engine killed": (6, tuple(ENGINES), (0.0, 0.5)),
    "engine stopped": (4, tuple(ENGINES), _SHORT),
    "engine stopped beyond the ttl": (4, tuple(ENGINES), _LONG),
    "engine cut from cache": (5, tuple(ENGINES), (0.0, 0.0)),
    "engine unheard by cache": (4, tuple(ENGINES), _SHORT),
    "engine unheard by cache beyond the ttl": (3, tuple(ENGINES), _LONG),
    "engine unheard by cache gives up": (3, tuple(ENGINES), _LONG),
    "engine silent beyond the ttl": (4, tuple(ENGINES), _LONG),
    "engine far from cache": (4, tuple(ENGINES), (1.0, 3.0)),
    "shard cut from cache": (4, tuple(SHARDS), (0.0, 0.0)),
    "shard unheard by cache": (3, tuple(SHARDS), _SHORT),
    "shard unheard by cache beyond the ttl": (2, tuple(SHARDS), _LONG),
    "shard far from cache": (3, tuple(SHARDS), (1.0, 3.0)),
    "shard cut from engines": (4, tuple(SHARDS), (0.0, 0.0)),
    "shard far from engines": (3, tuple(SHARDS), (1.0, 3.0)),
    "pool full": (4, tuple(ENGINES), (2.0, 4.0)),
    "arenas full": (3, ("rogue",), (0.5, 2.0)),
    "steps duplicated": (4, ("rogue",), (0.0, 0.0)),
    "steps reordered": (4, ("rogue",), (0.0, 0.0)),
    "plans replayed": (4, ("rogue",), (0.0, 0.0)),
}

CALM_AFTER = 12
"""Faults between two calms."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to do, `gap` seconds after the one before was begun."""

    number: int
    gap: float
    kind: str
    target: str
    seconds: float
    delay_seconds: float
    """Added to every message, for what is far."""


def schedule(seed: int, count: int) -> list[Fault]:
    """Faults in order. Every kind comes once before any comes by its weight; a silent engine's cache service is killed
    then, which is when silence matters."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    rng.shuffle(kinds)
    weights = [weight for weight, _, _ in KINDS.values()]
    kinds += rng.choices(list(KINDS), weights, k=count)
    made: list[Fault] = []
    for drawn in kinds:
        for kind in (drawn, "cache killed") if "silent" in drawn else (drawn,):
            _, targets, (least, most) = KINDS[kind]
            made.append(
                Fault(
                    len(made),
                    rng.choice((0.0, 0.1, 0.3, 0.6, 1.0)),
                    kind,
                    rng.choice(targets),
                    rng.uniform(least, most),
                    rng.choice((0.01, 0.05, 0.2)),
                )
            )
    return made[:count]
