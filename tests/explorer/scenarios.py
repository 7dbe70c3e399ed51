"""The rules, and for each the bounds under which its absence shows."""

from explorer.state import Bounds, Budget

B = Budget


def _writes(worker: str, block: str = "b0") -> tuple[str, ...]:
    name = f"A's worker on {worker}"
    return f"{name} holds {block}", f"{name} stamps {block}", f"{name} launches a write of {block}"


def _sealed(name: str) -> tuple[str, ...]:
    """Both shards seal (b0, g1.1)."""
    return (
        f"s0 carries out seal (b0, g1.1) {name}",
        "CP1 reads ack seal of s0",
        f"s1 carries out seal (b0, g1.1) {name}",
        "CP1 reads ack seal of s1",
    )


R_GETS = ("R, CP1: r0 gets (b0, g1.1)", "R receives a grant of (b0, g1.1) for r0")
R_SENDS = (*R_GETS, "R sends its write of b0 to s0", "R sends its write of b0 to s1")
R_WRITES = (
    *R_SENDS,
    "s0 accepts R's write of (b0, g1.1) r0",
    "s1 accepts R's write of (b0, g1.1) r0",
    "s0 runs R's kernel on (b0, g1.1)",
    "s1 runs R's kernel on (b0, g1.1)",
)
R_PUBLISHES = (*R_WRITES, "R commits b0", *_sealed("r0"), "R finishes with b0, drained")
A_LAUNCHES = ("A, CP1: a0 gets (b0, g1.1)", "A receives a grant of (b0, g1.1) for a0", *_writes("s0"))
A_WRITES = (
    *A_LAUNCHES,
    "A's worker on s0 completes its write of b0",
    *_writes("s1"),
    "A's worker on s1 completes its write of b0",
)
A_PUBLISHES = (*A_WRITES, "A commits b0", *_sealed("a0"), "A finishes with b0, drained")
CP2_READS = (
    "CP1 crashes",
    "CP2 starts",
    "s0 registers with CP2",
    "s1 registers with CP2",
    "CP2 reads the inventory of s0",
    "CP2 reads the inventory of s1",
)

SCENARIOS = {
    bounds.name: bounds
    for bounds in (
        Bounds("late writes", 1, B((("a",), ("r",)), duplicates=1)),
        Bounds(
            "late writes, restart of a shard",
            1,
            B((("a",), ("r",)), duplicates=1, reattaches=1),
            opening=(
                *R_SENDS,
                "s0 accepts R's write of (b0, g1.1) r0, and its copy is still under way",
                "s0 runs R's kernel on (b0, g1.1)",
            ),
            still=("s1 restarts",),
        ),
        Bounds("own blocks", 1, B((("a", "c"), ())), frozenset(("reuse",))),
        Bounds("forged grants", 1, B((("a",), ()), rogue=1), frozenset(("forge",))),
        Bounds("rewritten blocks", 1, B(((), ("r",)), rogue=1), frozenset(("rewrite",))),
        Bounds("a client that lies", 1, B(((), ("r", "q")), rogue=1), frozenset(("lie",))),
        Bounds("lease", 1, B((("a",), ("r",)), ticks=(2, 0))),
        Bounds("dead worker", 1, B((("a",), ("r",)), deaths=(1, 0))),
        Bounds("remote lease", 1, B((("a",), ("r",)), ticks=(0, 2), deaths=(0, 1)), still=("A's worker on s1",)),
        Bounds("hit", 1, B((("a",), ("a", "r")), evictions=1)),
        Bounds(
            "hit under a lease",
            1,
            B((("r",), ("r", "q")), ticks=(2, 0), evictions=1),
            opening=R_PUBLISHES,
            still=("A's worker on s1",),
        ),
        Bounds(
            "two blocks", 2, B((("a",), ("a", "r")), evictions=1), opening=A_PUBLISHES[:-1], still=("A's worker on s1",)
        ),
        Bounds("revocation", 1, B((("a",), ("r",)), revocations=1)),
        Bounds("removal", 1, B((("a",), ("a",)), removals=1), frozenset(("queue",)), opening=A_LAUNCHES),
        Bounds("removal and restart", 1, B(((), ("r", "r")), removals=1, starts=1, crashes=1), opening=R_PUBLISHES),
        Bounds("restart, launched", 1, B((("a",), ("r",)), starts=1, crashes=1), opening=A_LAUNCHES),
        Bounds(
            "restart, stopped",
            1,
            B((("a",), ("r",)), starts=1, crashes=1, ticks=(2, 0)),
            opening=A_LAUNCHES,
            still=("A's worker on s1", "A, CP", "A says", "A commits"),
        ),
        Bounds(
            "restart, remote", 1, B((("a",), ("r",)), starts=1, crashes=1), opening=R_GETS, still=("A's worker on s1",)
        ),
        Bounds("restart, attached", 1, B((("a", "c"), ()), starts=1, crashes=1, evictions=1), opening=A_PUBLISHES),
        Bounds("restart, remote grant", 1, B(((), ("r", "q")), starts=1, crashes=1, evictions=1), opening=R_PUBLISHES),
        Bounds(
            "restart, undelivered hit",
            1,
            B((("r",), ("r", "q")), starts=1, crashes=1, evictions=1),
            opening=(*R_PUBLISHES, "A, CP1: r0 hits (b0, g1.1)", *CP2_READS),
        ),
        Bounds("two control planes", 1, B((("a",), ("r",)), starts=1), opening=R_GETS),
        Bounds(
            "superseded renewal",
            1,
            B((("r",), ("r", "q")), starts=1, ticks=(2, 0), evictions=1),
            opening=(*R_PUBLISHES, "A, CP1: r0 hits (b0, g1.1)", *CP2_READS[1:]),
            still=("A's worker on s1",),
        ),
        Bounds("lost memory", 1, B((("a",), ("r",)), losses=1), opening=A_LAUNCHES),
        Bounds(
            "lost memory, remote",
            1,
            B((("a",), ("r",)), losses=1),
            opening=R_SENDS,
            still=("A's worker on s0", "s1 restarts"),
        ),
        Bounds("memory taken up again", 1, B((("a",), ("r",)), reattaches=1), opening=A_LAUNCHES),
        Bounds(
            "all restart",
            1,
            B((("a",), ("r",)), reattaches=2, starts=1, crashes=1),
            frozenset(("open",)),
            opening=(*A_LAUNCHES, "CP1 crashes", "s0 restarts and takes its memory up again"),
            still=("A's worker on s1",),
        ),
    )
}

RULES = {
    "stale generations are refused": "a client that lies",
    "a plan runs once": "late writes",
    "filled slots refuse writes": "rewritten blocks",
    "grants checked": "forged grants",
    "stream order": "own blocks",
    "deferral": "late writes",
    "acknowledgement means drained": "revocation",
    "a drained finish acknowledges": "revocation",
    "commit after completion": "hit",
    "index after the last acknowledgement": "hit",
    "a digest counts when it is on all shards": "hit",
    "hold maps": "lease",
    "hold bit before the lease check": "lease",
    "an empty hold map counts after the lease": "lease",
    "only messages renew a lease": "hit under a lease",
    "nothing is launched after ttl/2": "hit under a lease",
    "gone means gone on every shard": "dead worker",
    "a version raise hashes waiting requests again": "removal",
    "the namespace version is stored before the answer": "removal and restart",
    "the incarnation is raised": "restart, remote",
    "incarnation in grants": "restart, remote grant",
    "incarnation on messages": "restart, attached",
    "a row counts only with its stamp": "restart, attached",
    "a stamp below the raised incarnation": "restart, attached",
    "stamps are read again before READY": "restart, attached",
    "a cut at a declaration defers": "restart, remote",
    "a declaration lists what was released and still runs": "restart, launched",
    "stream epoch": "restart, undelivered hit",
    "sessions and hold maps in shared memory": "all restart",
    "boot id on messages": "late writes, restart of a shard",
    "a new pool epoch defers": "lost memory",
    "pool epoch in grants": "lost memory, remote",
    "a superseded renewal renews nothing": "superseded renewal",
}
"""Every rule that is necessary by itself, and the scenario in which its absence shows."""

SECOND_LINES = ("sealed rows refuse writes", "a seal needs its stamp")
"""Rules that stop nothing here that another rule does not stop already."""

ALL_RULES = (*RULES, *SECOND_LINES)

EVERYTHING = Bounds(
    "everything at once",
    2,
    B(
        (("a", "r", "c"), ("r", "a", "q")),
        starts=2,
        crashes=2,
        losses=1,
        reattaches=1,
        ticks=(3, 3),
        deaths=(1, 1),
        duplicates=2,
        rogue=1,
        evictions=2,
        removals=1,
        revocations=1,
    ),
    frozenset(("reuse", "open", "rewrite", "forge")),
)
