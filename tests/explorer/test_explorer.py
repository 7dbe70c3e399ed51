"""The protocol's rules, searched: none is violated when all are in force, and each is missed when it is left out."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from explorer.scenarios import ALL_RULES, EVERYTHING, RULES, SCENARIOS, SECOND_LINES
from explorer.search import Result, search, walk
from explorer.state import Bounds, Budget

WALKS = 60
LARGE = 120_000
"""States of the search in which everything may happen; it is cut off there."""

Jobs = dict[tuple[str, str], "Future[Result]"]
"""By scenario and the rule that is left out."""


def _without(rule: str, scenario: str) -> Result:
    return search((each for each in ALL_RULES if each != rule), SCENARIOS[scenario])


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """All searches of this file, on all processors at once."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        wanted = [("", each) for each in SCENARIOS] + list(RULES.items())
        yield {(rule, scenario): pool.submit(_without, rule, scenario) for rule, scenario in wanted}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_rules_hold(jobs: Jobs, scenario: str) -> None:
    result = jobs["", scenario].result()
    assert not result.violation, (result.violation, *result.trace)
    assert result.complete
    assert result.states > 100


@pytest.mark.parametrize(("rule", "scenario"), RULES.items())
def test_a_rule_left_out_is_missed(jobs: Jobs, rule: str, scenario: str) -> None:
    result = jobs[rule, scenario].result()
    assert result.violation
    assert len(result.trace) >= 5


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("deferral", "wrong bytes"),
        ("index after the last acknowledgement", "a lost prefix"),
        ("the namespace version is stored before the answer", "removed content"),
        ("the incarnation is raised", "a generation is handed out twice"),
    ],
)
def test_what_is_missed(jobs: Jobs, rule: str, kind: str) -> None:
    assert jobs[rule, RULES[rule]].result().violation.startswith(kind)


def test_second_lines_are_not_necessary_alone() -> None:
    """If one of them is, it belongs among the rules with a scenario."""
    for rule, scenario in zip(SECOND_LINES, ("rewritten blocks", "restart, remote grant"), strict=True):
        assert not _without(rule, scenario).violation


def test_a_client_that_lies_beside_attached_processes() -> None:
    """A known limit (docs/protocol.md): hence pools of mixed trust are remote only."""
    budget = Budget((("a",), ("r",)), rogue=1)
    result = search(ALL_RULES, Bounds("a limit", 1, budget, frozenset(("lie",))))
    assert result.violation.startswith("wrong bytes: A reads 'r0'")


@pytest.mark.slow
def test_all_rules_hold_when_everything_may_happen() -> None:
    """The shortest runs exhaustively, long ones at random."""
    result = search(ALL_RULES, EVERYTHING, cap=LARGE)
    assert not result.violation, (result.violation, *result.trace)
    for seed in range(4):
        result = walk(ALL_RULES, EVERYTHING, seed, WALKS)
        assert not result.violation, (result.violation, *result.trace)


@pytest.mark.slow
def test_random_walks_miss_rules_too() -> None:
    """Walks that could not fail would say nothing."""
    for rule in ("deferral", "stream order", "index after the last acknowledgement"):
        rules = [each for each in ALL_RULES if each != rule]
        assert any(walk(rules, EVERYTHING, seed, WALKS).violation for seed in range(6)), rule
