"""The rules, and for each the bounds under which its absence shows."""

from explorer.state import Bounds, Budget

B = Budget

SCENARIOS = {
    bounds.name: bounds
    for bounds in (
        Bounds("late writes", 1, B((("a",), ("r",)), duplicates=1)),
        Bounds("own blocks", 1, B((("a", "c"), ())), frozenset(("reuse",))),
        Bounds("rogue", 1, B(((), ("r",)), rogue=1)),
        Bounds("rogue and attached", 1, B((("a",), ()), rogue=1)),
        Bounds("lease", 1, B((("a",), ("r",)), ticks=(2, 0))),
        Bounds("dead worker", 1, B((("a",), ("r",)), deaths=(1, 0))),
        Bounds("remote lease", 1, B((("a",), ("r",)), ticks=(0, 2), deaths=(0, 1))),
        Bounds("hit", 1, B((("a",), ("a", "r")), evictions=1)),
        Bounds("hit under a lease", 1, B((("x",), ("x", "r")), ticks=(2, 0), evictions=1)),
        Bounds("revocation", 1, B((("a",), ("r",)), revocations=1)),
        Bounds("removal", 1, B((("a",), ("a",)), removals=1), frozenset(("queue",))),
        Bounds("removal and restart", 1, B(((), ("r", "r")), removals=1, starts=1, crashes=1)),
        Bounds("restart, attached", 1, B((("a",), ("r",)), starts=1, crashes=1, ticks=(2, 0))),
        Bounds("restart, remote", 1, B((("a",), ("r",)), starts=1, crashes=1)),
        Bounds("restart, eviction", 1, B((("a", "c"), ()), starts=1, crashes=1, evictions=1)),
        Bounds("restart, remote eviction", 1, B(((), ("r", "q")), starts=1, crashes=1, evictions=1)),
        Bounds("two control planes", 1, B((("a",), ("r",)), starts=1)),
        Bounds("lost memory", 1, B((("a",), ("r",)), losses=1)),
        Bounds("memory taken up again", 1, B((("a",), ("r",)), reattaches=1)),
        Bounds("all restart", 1, B((("a",), ("r",)), reattaches=2, starts=1, crashes=1)),
    )
}
