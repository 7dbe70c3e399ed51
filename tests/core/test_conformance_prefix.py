"""The engines' own prefix-caching behaviour, number by number, with immediate acknowledgements and LRU.

Where kvplane differs on purpose, the test says so: publication happens after the commit and its seal (I3),
never at allocation, and a reset always succeeds.
"""

import pytest

from core_driver import Engine, free_list, pack, published, references, small_core
from kvplane.cache.core import Admit, HitReason, Reason
from kvplane.wire.digests import ExtraKey, ExtraKeyKind
from kvplane.wire.identity import Namespace

COMMON = [token for token in range(3) for _ in range(16)]
"""48 tokens: three full blocks."""


def test_prefill_shares_full_blocks_and_keeps_the_engines_free_order() -> None:
    core = small_core(11)
    engine = Engine(core)
    first = engine.admit(COMMON + [3] * 7)
    assert engine.tables[first] == [1, 2, 3, 4]
    assert published(core, [1, 2, 3, 4]) == [True, True, True, False]
    assert references(core, [1, 2, 3, 4]) == [1, 1, 1, 1]

    second, admission = engine.ask(COMMON + [3] * 5)
    assert admission is not None
    assert admission.cached_tokens == 48
    assert admission.hit_reason == HitReason.FULL
    assert engine.tables[second] == [1, 2, 3, 5]
    assert references(core, [1, 2, 3, 5]) == [2, 2, 2, 1]
    assert core.state.pool.available == 5

    engine.finish(first)
    engine.finish(second)
    assert free_list(core) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    third, admission = engine.ask(COMMON + [3] * 6)
    assert admission is not None
    assert admission.cached_tokens == 48
    assert engine.tables[third] == [1, 2, 3, 5]
    assert core.state.pool.available == 6
    engine.finish(third)

    miss, admission = engine.ask([99] * 160)
    assert admission is not None
    assert admission.cached_tokens == 0
    assert engine.tables[miss] == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert core.state.pool.available == 0
    assert free_list(core) == []


def test_decode_publishes_a_block_when_its_last_token_is_committed() -> None:
    core = small_core(11)
    engine = Engine(core)
    sequence = engine.admit(COMMON + [3] * 7)
    engine.decode(sequence, [8] * 4)
    assert engine.tables[sequence] == [1, 2, 3, 4]
    assert published(core, [4]) == [False]
    engine.decode(sequence, [9] * 19)
    assert engine.tables[sequence] == [1, 2, 3, 4, 5]
    assert published(core, [4, 5]) == [True, False]


def test_evict_takes_the_oldest_tail_first() -> None:
    core = small_core(11)
    engine = Engine(core)
    first = engine.admit(list(range(5 * 16 + 7)))
    second = engine.admit(list(range(1000, 1000 + 48)))
    assert len(engine.tables[first]) == 6
    assert len(engine.tables[second]) == 3
    assert core.state.pool.available == 1
    engine.finish(first)
    assert free_list(core) == [6, 10, 5, 4, 3, 2, 1]
    engine.finish(second)
    assert free_list(core) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    third, admission = engine.ask(list(range(2 * 16 + 3)))
    assert admission is not None
    assert admission.cached_tokens == 32
    assert engine.tables[third] == [1, 2, 6]
    assert core.state.pool.available == 7


def test_a_new_occupant_is_not_published_under_the_old_digest() -> None:
    core = small_core(2)
    engine = Engine(core)
    engine.finish(engine.admit(list(range(16))))
    assert published(core, [1]) == [True]
    sequence = engine.admit(list(range(15)))
    assert engine.tables[sequence] == [1]
    assert published(core, [1]) == [False]


def test_blocks_that_were_hit_are_not_evicted_for_the_rest() -> None:
    core = small_core(3)
    engine = Engine(core)
    head, tail = list(range(16)), list(range(100, 116))
    engine.finish(engine.admit(head))
    engine.finish(engine.admit(tail))
    sequence, admission = engine.ask(head + tail)
    assert admission is not None
    assert admission.cached_tokens == 16
    assert engine.tables[sequence] == [1, 2]


def test_prefix_caching_off() -> None:
    core = small_core(5, block_tokens=4, prefix_caching=False)
    engine = Engine(core)
    sequence = engine.admit(list(range(10)))
    assert len(engine.tables[sequence]) == 3
    engine.finish(sequence)
    sequence, admission = engine.ask(list(range(16)))
    assert admission is not None
    assert admission.cached_tokens == 0
    assert admission.hit_reason == HitReason.CACHING_OFF
    assert len(engine.tables[sequence]) == 4
    _, admission = engine.ask(list(range(4)))
    assert admission is None
    assert core.statistics().query_tokens == 0 or core.statistics().hit_tokens == 0


def test_not_enough_blocks_with_hits_changes_nothing() -> None:
    core = small_core(11)
    engine = Engine(core)
    kept = engine.admit(COMMON)
    full = COMMON + [token for token in range(3, 6) for _ in range(16)]
    engine.finish(engine.admit(full))
    other = engine.admit([77] * 32)
    assert core.state.pool.available == 5
    before = references(core, range(1, 11))
    assert references(core, engine.tables[kept]) == [1, 1, 1]
    # 6 blocks hit, 3 of them cached; 3 more with 5 available, of which the hits take 3.
    _, admission = engine.ask(full + [token for token in range(6, 9) for _ in range(16)])
    assert admission is None
    assert engine.result is not None
    assert engine.result.states[-1].reason == Reason.NO_SPACE
    assert references(core, range(1, 11)) == before
    engine.finish(other)


def test_a_whole_prompt_hit_still_computes_one_token() -> None:
    engine = Engine(small_core(11))
    engine.finish(engine.admit(COMMON))
    _, admission = engine.ask(COMMON)
    assert admission is not None
    assert admission.cached_tokens == 32
    assert admission.hit_reason == HitReason.FULL


def test_a_request_that_may_not_read_still_writes_and_duplicates() -> None:
    core = small_core(21)
    engine = Engine(core)
    first = engine.admit(COMMON + [3] * 7)
    second, admission = engine.ask(COMMON + [3] * 7, read_cache=False)
    assert admission is not None
    assert admission.cached_tokens == 0
    assert admission.hit_reason == HitReason.READ_OFF
    assert engine.tables[second] == [5, 6, 7, 8]
    assert references(core, [5, 6, 7]) == [1, 1, 1]
    # Kept as spares: their holder pins the canonical blocks, so nothing below them can be evicted (I4).
    assert published(core, [5, 6, 7]) == [False] * 3
    assert core.state.pool.spares == {5: 1, 6: 2, 7: 3}
    engine.finish(first)
    assert references(core, [1, 2, 3]) == [1, 1, 1]
    engine.finish(second)
    assert core.state.pool.spares == {}
    assert core.statistics().cached == 3
    third = engine.admit([500 + token for token in range(48)], read_cache=False)
    engine.finish(third)
    _, admission = engine.ask([500 + token for token in range(48)] + [1])
    assert admission is not None
    assert admission.cached_tokens == 48


def test_multimodal_content_is_part_of_the_digest_wherever_it_overlaps() -> None:
    core = small_core(30)
    engine = Engine(core)
    tokens = list(range(11)) + [-1 & 0xFFFF] * 10 + list(range(21, 30)) + [7] * 18 + [8] * 7 + list(range(55, 64))
    image = ExtraKeyKind.MULTIMODAL
    keys = {
        0: (ExtraKey(image, b"aaa", 11),),
        1: (ExtraKey(image, b"aaa", -5), ExtraKey(image, b"bbb", 14)),
        2: (ExtraKey(image, b"bbb", -2),),
        3: (ExtraKey(image, b"ccc", 0),),
    }
    engine.finish(engine.admit(tokens, extra_keys=keys))
    _, admission = engine.ask([*tokens, 1], extra_keys=keys)
    assert admission is not None
    assert admission.cached_tokens == 64
    # Another second image changes block 1 and everything behind it, although later blocks look the same.
    other = keys | {1: (ExtraKey(image, b"aaa", -5), ExtraKey(image, b"zzz", 14))}
    _, admission = engine.ask([*tokens, 1], extra_keys=other)
    assert admission is not None
    assert admission.cached_tokens == 16
    _, admission = engine.ask([*tokens, 1])
    assert admission is not None
    assert admission.cached_tokens == 0


def test_content_in_a_prompts_last_block_is_part_of_the_digest_when_decoding_fills_it() -> None:
    core = small_core(30)
    engine = Engine(core)
    keys = {1: (ExtraKey(ExtraKeyKind.MULTIMODAL, b"aaa", 4),)}
    sequence = engine.admit(list(range(24)), extra_keys=keys)
    engine.decode(sequence, list(range(24, 40)))
    engine.finish(sequence)
    for other, hit in ((keys, 32), ({1: (ExtraKey(ExtraKeyKind.MULTIMODAL, b"bbb", 4),)}, 16), ({}, 16)):
        _, admission = engine.ask([*range(40), 1], extra_keys=other)
        assert admission is not None
        assert admission.cached_tokens == hit


def test_namespaces_share_nothing() -> None:
    core = small_core(30)
    engine = Engine(core)
    one = core.register_namespace(Namespace(tenant_salt=b"one"))
    two = core.register_namespace(Namespace(tenant_salt=b"two"))
    assert core.register_namespace(Namespace(tenant_salt=b"one")) == one
    engine.admit([*COMMON, 3], namespace_id=one)
    _, same = engine.ask([*COMMON, 4], namespace_id=one)
    _, other = engine.ask([*COMMON, 4], namespace_id=two)
    assert same is not None
    assert other is not None
    assert (same.cached_tokens, other.cached_tokens) == (48, 0)


def test_max_hit_tokens_caps_the_hit() -> None:
    engine = Engine(small_core(30))
    engine.admit([*COMMON, 3])
    _, admission = engine.ask([*COMMON, 4], max_hit_tokens=40)
    assert admission is not None
    assert (admission.cached_tokens, admission.hit_reason) == (32, HitReason.CAPPED)


def test_reset_always_succeeds_and_forgets_held_blocks_too() -> None:
    # The engines refuse a reset while anything is held; a raised version needs no such excuse.
    core = small_core(11)
    engine = Engine(core)
    running = engine.admit(COMMON + [3] * 7)
    engine.finish(engine.admit([50] * 32))
    assert core.reset() == 5
    core.check_integrity()
    assert core.statistics().cached == 0
    assert published(core, range(1, 11)) == [False] * 10
    _, admission = engine.ask([*COMMON, 4])
    assert admission is not None
    assert admission.cached_tokens == 0
    engine.finish(running)


@pytest.mark.parametrize("settled", [True, False])
def test_reset_keeps_waiting_sequences_and_hashes_them_again(settled: bool) -> None:
    core = small_core(11)
    engine = Engine(core, settles=settled)
    writer = engine.admit(COMMON + [3] * 7)
    waiting, admission = engine.ask([*COMMON, 4], max_admissions=0)
    assert admission is None
    core.reset()
    engine.settle()
    assert published(core, engine.tables[writer]) == [False] * 4
    engine.settles = True
    again = engine.ask_again(waiting)
    assert again is not None
    assert again.cached_tokens == 0
    engine.finish(writer, waiting)


def test_hit_statistics_count_an_admission_once() -> None:
    core = small_core(11)
    engine = Engine(core)
    engine.finish(engine.admit(COMMON))
    blocker = engine.admit([9] * (16 * 7))
    refused, admission = engine.ask(COMMON + [4] * 20)
    assert admission is None
    assert core.statistics().query_tokens == 48 + 112
    engine.finish(blocker)
    admission = engine.ask_again(refused)
    assert admission is not None
    statistics = core.statistics()
    assert (statistics.query_tokens, statistics.hit_tokens) == (48 + 112 + 68, 48)


def test_everything_comes_back_when_all_sequences_end() -> None:
    core = small_core(11)
    engine = Engine(core)
    sequences = [engine.admit([row] * 30) for row in range(5)]
    engine.finish(*sequences)
    statistics = core.statistics()
    assert statistics.free + statistics.cached == 10
    assert references(core, range(1, 11)) == [0] * 10


def test_miss_reasons_tell_never_seen_from_evicted() -> None:
    core = small_core(5)
    engine = Engine(core)
    _, never = engine.ask([1] * 40)
    assert never is not None
    assert never.hit_reason == HitReason.NEVER_SEEN
    engine.finish(*engine.tables)
    engine.finish(engine.admit([2] * 64))
    _, evicted = engine.ask([1] * 40)
    assert evicted is not None
    assert evicted.hit_reason == HitReason.EVICTED
    engine.finish(*engine.tables)
    _, short = engine.ask([1] * 10)
    assert short is not None
    assert short.hit_reason == HitReason.TOO_SHORT


def test_prompts_hashed_ahead_in_slices_are_admitted_with_the_same_digests() -> None:
    core = small_core(30)
    engine = Engine(core)
    tokens = list(range(100))
    chain = core.hash_prompt(0, pack(tokens), max_blocks=2)
    assert len(chain) == 2
    while len(chain) < 6:
        chain = core.hash_prompt(0, pack(tokens), chain=chain, max_blocks=2)
    engine.admit(tokens)
    assert core.lookup(chain) == 96
    sequence = engine.new_id()
    result = engine.step(admit=(Admit(sequence, pack(tokens), chain=chain),))
    assert result.admissions[0].cached_tokens == 96
