"""The protocol as a small model, searched: how many states, what is violated, and the shortest trace without each rule.

JSON keys: `states` (visited with all rules in force, over all scenarios and the bound in which everything may happen),
`violations` (0 is promised), `rules` and `rules_caught` (left out one at a time). See docs/protocol.md.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from explorer.scenarios import ALL_RULES, EVERYTHING, RULES, SCENARIOS
from explorer.search import search, walk


def main() -> None:
    """Search, print, and say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the bound in which everything may happen")
    parser.add_argument("--cap", type=int, default=200_000, help="states of that bound's search")
    parser.add_argument("--walks", type=int, default=400, help="random walks in that bound")
    parser.add_argument("--seed", type=int, default=0, help="of the walks")
    arguments = parser.parse_args()

    states = violations = 0
    print("All rules in force:")
    for name, bounds in SCENARIOS.items():
        began = time.perf_counter()
        result = search(ALL_RULES, bounds)
        states += result.states
        violations += bool(result.violation)
        print(f"  {name}: {result.states} states, {time.perf_counter() - began:.1f} s {result.violation}", flush=True)
        _print_trace(result.trace)
    if not arguments.quick:
        result = search(ALL_RULES, EVERYTHING, cap=arguments.cap)
        print(f"  {EVERYTHING.name}: {result.states} states (complete: {result.complete}) {result.violation}")
        _print_trace(result.trace)
        walked = walk(ALL_RULES, EVERYTHING, arguments.seed, arguments.walks)
        print(f"  {EVERYTHING.name}: {walked.states} steps of random walks {walked.violation}")
        _print_trace(walked.trace)
        states += result.states
        violations += bool(result.violation) + bool(walked.violation)
    caught = 0
    for rule, scenario in RULES.items():
        result = search((each for each in ALL_RULES if each != rule), SCENARIOS[scenario])
        caught += bool(result.violation)
        print(f"\nWithout {rule!r} ({scenario}, {result.states} states): {result.violation or 'NOT CAUGHT'}")
        _print_trace(result.trace)
    print(json.dumps({"states": states, "violations": violations, "rules_caught": caught, "rules": len(RULES)}))
    sys.exit(0 if not violations and caught == len(RULES) else 1)


def _print_trace(trace: tuple[str, ...]) -> None:
    for number, step in enumerate(trace, 1):
        print(f"    {number:2} {step}")


if __name__ == "__main__":
    main()
