"""Sliding window, need and skip rules: the engines' own numbers."""

import numpy as np
import pytest

from core_driver import Engine, published, references, small_core, u32, u64
from kvplane.cache.core import FullAttention, Lengths, Observe, SlidingWindow
from kvplane.cache.core.groups import rules_for
from kvplane.wire.errors import InvalidArgumentError, UnsupportedFeatureError


@pytest.mark.parametrize(
    ("present", "blocks"),
    [
        ("FFFFFF", 0),
        ("T", 1),
        ("TF", 1),
        ("TT", 2),
        ("TTF", 2),
        ("TTTF", 3),
        ("TTFTFFTTFTTT", 12),
        ("TTFTFFTTFFFF", 8),
        ("TTFTFFTTFFFT", 8),
    ],
)
def test_a_window_hit_needs_only_the_windows_blocks(present: str, blocks: int) -> None:
    rules = rules_for(SlidingWindow(4), 2, 1024)
    assert rules.longest_hit(np.array([each == "T" for each in present]))[0] == blocks


@pytest.mark.parametrize(("computed", "expired"), [(4, 0), (5, 1), (6, 1), (7, 2), (11, 4)])
def test_blocks_before_the_window_are_skipped(computed: int, expired: int) -> None:
    assert rules_for(SlidingWindow(4), 2, 1024).first_needed(computed) == expired


def test_full_attention_skips_nothing_and_stops_at_the_first_miss() -> None:
    rules = rules_for(FullAttention(), 2, 1024)
    assert rules.first_needed(1000) == 0
    assert rules.longest_hit(np.array([True, True, False, True])) == (2, 0)
    assert rules.prompt_blocks(10, 0, 20) == 10


def test_a_window_prompt_needs_no_more_than_its_window_and_a_chunk() -> None:
    rules = rules_for(SlidingWindow(128), 16, 4)
    assert rules.prompt_blocks(0, 0, 64) == 8 + 1 + 4
    assert rules.prompt_blocks(20, 15, 64) == 8
    assert rules.prompt_blocks(0, 0, 5) == 5


def test_expired_blocks_are_released_and_become_null() -> None:
    core = small_core(21, block_tokens=2, group=SlidingWindow(4))
    engine = Engine(core)
    sequence = engine.admit([1, 2, 3, 4])
    assert engine.tables[sequence] == [1, 2]
    engine.decode(sequence, [5])
    assert engine.tables[sequence] == [0, 2, 3]
    assert engine.generations[sequence][0] == 0
    engine.decode(sequence, [6, 7])
    assert engine.tables[sequence] == [0, 0, 3, 4]
    engine.decode(sequence, [8, 9, 10, 11])
    assert engine.tables[sequence][:4] == [0, 0, 0, 0]
    assert published(core, [1, 2]) == [True, True]
    assert core.statistics().cached == 4


def test_a_window_sequence_hits_what_another_left_behind() -> None:
    core = small_core(21, block_tokens=2, group=SlidingWindow(4))
    engine = Engine(core)
    tokens = list(range(12))
    engine.finish(engine.admit(tokens))
    sequence, admission = engine.ask([*tokens, 99])
    assert admission is not None
    assert admission.cached_tokens == 12
    table = engine.tables[sequence]
    # Blocks 4 and 5 hit; with token 13 written, the next one reads from block 5 on.
    assert table[:5] == [0, 0, 0, 0, 0]
    assert references(core, table[5:]) == [1, 1]


@pytest.mark.parametrize(("other_tokens", "hit"), [(12, 12), (14, 0)])
def test_blocks_outside_the_window_may_be_evicted(other_tokens: int, hit: int) -> None:
    core = small_core(9, block_tokens=2, group=SlidingWindow(4))
    engine = Engine(core)
    tokens = list(range(12))
    engine.finish(engine.admit(tokens))
    # Two of eight usable blocks are still free; the four that expired first go first.
    engine.finish(engine.admit([50 + token for token in range(other_tokens)], write_cache=False))
    _, admission = engine.ask([*tokens, 99])
    assert admission is not None
    assert admission.cached_tokens == hit


def test_kinds_that_are_not_built_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        rules_for("mamba", 16, 1024)
    assert caught.value.metadata == {"group": "str"}
    with pytest.raises(InvalidArgumentError):
        small_core(10, group=SlidingWindow(0))


def test_drafts_that_shrink_never_take_a_negative_number_of_blocks() -> None:
    core = small_core(11)
    engine = Engine(core)
    sequence = engine.admit([1] * 14)
    engine.step(
        observe=Observe(u64(sequence), u32(17), np.arange(17, dtype=np.uint32)),
        extend=Lengths(u64(sequence), u32(31)),
    )
    assert len(engine.tables[sequence]) == 2
    engine.step(rollback=Lengths(u64(sequence), u32(15)), extend=Lengths(u64(sequence), u32(16)))
    assert core.statistics().held == 1
    engine.step(extend=Lengths(u64(sequence), u32(1)))
    assert core.statistics().held == 1
