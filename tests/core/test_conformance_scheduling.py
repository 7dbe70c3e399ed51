"""Preemption, admission and reservation: the KV part of the engines' scheduler tests."""

import numpy as np

from core_driver import Engine, small_core, u32, u64
from kvplane.cache.core import Admit, Finish, HitReason, Lengths, Observe, Reason, SequenceState


def test_the_latest_arrival_yields_and_its_late_token_is_kept() -> None:
    core = small_core(11)
    engine = Engine(core)
    first = engine.admit([1] * 80)
    second = engine.admit([2] * 80)
    assert core.state.pool.available == 0
    seen = engine.step_id
    result = engine.step(observe=Observe(u64(first), u32(1), u32(9)), extend=Lengths(u64(first), u32(81)))
    assert [(each.sequence_id, each.state) for each in result.states] == [(second, SequenceState.PREEMPTED)]
    (preemption,) = result.preemptions
    assert (preemption.sequence_id, preemption.requester_id) == (second, first)
    assert (preemption.blocks_needed, preemption.blocks_freed, preemption.candidates) == (1, 5, 2)
    # Five full blocks of it are published, so resuming computes nothing but the last token again.
    assert preemption.tokens_to_recompute == 0
    assert len(engine.tables[first]) == 6
    # The step was sent before the preemption was known: its token is kept, the rest is skipped.
    result = engine.step(
        last_seen_step=seen,
        completed_step=seen,
        observe=Observe(u64(second), u32(1), u32(7)),
        commit=Lengths(u64(second), u32(80)),
    )
    assert [each.sequence_id for each in result.skipped] == [second]
    assert core.state.rows.record(core.state.rows.ids.tolist().index(second)).tokens[-4:] == b"\x07\0\0\0"


def test_the_less_important_class_yields_although_it_came_first() -> None:
    core = small_core(6)
    engine = Engine(core)
    low = engine.admit([1] * 32, priority=5)
    high = engine.admit([2] * 32, priority=0)
    engine.decode(high, [3] * 16)
    result = engine.decode(high, [4])
    assert [each.sequence_id for each in result.preemptions] == [low]
    assert len(engine.tables[high]) == 4


def test_a_preempted_sequence_resumes_by_hitting_what_it_published() -> None:
    core = small_core(5)
    engine = Engine(core)
    low = engine.admit([1] * 30, priority=5)
    high = engine.admit([2] * 32, priority=0)
    result = engine.decode(high, [3])
    assert [each.sequence_id for each in result.preemptions] == [low]
    assert engine.ask_again(low) is None
    engine.finish(high)
    engine.step(observe=Observe(u64(low), u32(1), u32(100)))
    admission = engine.ask_again(low)
    assert admission is not None
    assert admission.resumed
    assert admission.num_slots == 31
    assert admission.cached_tokens in (0, 16)


def test_nobody_is_preempted_while_there_is_space() -> None:
    core = small_core(11)
    engine = Engine(core)
    sequences = [engine.admit([row] * 20) for row in range(5)]
    for sequence in sequences:
        engine.decode(sequence, [7] * 10)
    assert core.statistics().preemptions == 0


def test_a_sequence_that_nobody_yields_to_preempts_itself() -> None:
    core = small_core(6)
    engine = Engine(core)
    engine.admit([1] * 48)
    late = engine.admit([2] * 32)
    result = engine.decode(late, [3])
    assert [(each.sequence_id, each.requester_id) for each in result.preemptions] == [(late, late)]


def test_a_sequence_alone_in_a_full_pool_stalls() -> None:
    core = small_core(3)
    engine = Engine(core)
    alone = engine.admit([1] * 32)
    result = engine.decode(alone, [2])
    assert result.states[-1].state == SequenceState.STALLED
    assert result.states[-1].reason == Reason.NO_VICTIM
    assert result.preemptions == ()


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    core = small_core(11)
    engine = Engine(core)
    first = engine.admit([1] * 80)
    engine.admit([2] * 80)
    waiting = engine.new_id()
    result = engine.step(
        observe=Observe(u64(first), u32(1), u32(9)),
        extend=Lengths(u64(first), u32(81)),
        admit=(Admit(waiting, np.array([5], np.uint32).tobytes()),),
    )
    assert result.states[-1].reason == Reason.PREEMPTED_THIS_STEP


def test_coming_blocks_prevent_a_preemption() -> None:
    core = small_core(11)
    engine = Engine(core)
    first = engine.admit([1] * 80)
    second = engine.admit([2] * 48)
    third = engine.admit([3] * 32)
    before = engine.step_id
    engine.known.pop(third)
    # Nothing of the step that last used them has completed yet: the blocks are coming, not here.
    engine.step(completed_step=before - 1, finish=Finish(u64(third), u32(1)))
    assert core.statistics().quarantined == 2
    result = engine.step(
        completed_step=before - 1,
        observe=Observe(u64(first), u32(1), u32(9)),
        extend=Lengths(u64(first), u32(81)),
    )
    assert result.preemptions == ()
    assert (result.states[-1].state, result.states[-1].reason) == (
        SequenceState.STALLED,
        Reason.BLOCKS_COMING,
    )
    engine.step(extend=Lengths(u64(first), u32(81)))
    assert len(engine.tables[first]) == 6
    assert len(engine.tables[second]) == 3


def test_a_chunk_reserves_the_rest_of_its_prompt() -> None:
    core = small_core(10)
    engine = Engine(core)
    first = engine.admit([1] * (8 * 16), num_slots=64)
    assert len(engine.tables[first]) == 4
    assert core.statistics().reserved == 4
    # Nine usable, four taken, four promised: five more do not fit, whatever is free at the moment.
    second, admission = engine.ask([2] * (5 * 16))
    assert admission is None
    assert engine.result is not None
    assert engine.result.states[-1].reason == Reason.NO_SPACE
    third, admission = engine.ask([3] * 16)
    assert admission is not None
    engine.step(extend=Lengths(u64(first), u32(128)))
    assert len(engine.tables[first]) == 8
    assert core.statistics().reserved == 0
    assert core.statistics().preemptions == 0
    engine.finish(first, second, third)


def test_the_watermark_counts_only_while_something_runs() -> None:
    core = small_core(101, watermark=0.1)
    engine = Engine(core)
    first = engine.admit([1] * (95 * 16))
    _, admission = engine.ask([2] * 16)
    assert admission is None
    engine.finish(first)
    assert engine.ask([2] * 16)[1] is not None


def test_admission_limits_of_a_step() -> None:
    core = small_core(101)
    engine = Engine(core)
    ids = [engine.new_id(row) for row in range(4)]
    prompts = [np.full(40, 10 + row, np.uint32).tobytes() for row in range(4)]
    result = engine.step(
        admit=tuple(Admit(each, prompt) for each, prompt in zip(ids, prompts, strict=True)),
        max_admissions=3,
        max_admitted_tokens=100,
    )
    assert [(each.sequence_id, each.num_slots) for each in result.admissions] == [
        (ids[0], 40),
        (ids[1], 40),
        (ids[2], 20),
    ]
    assert result.states[-1].reason == Reason.STEP_LIMIT
    result = engine.step(admit=(Admit(ids[3]),))
    assert result.admissions[0].num_slots == 40


def test_sixty_four_identical_prompts_compute_it_once() -> None:
    core = small_core(400)
    engine = Engine(core, max_sequences=64)
    prompt = np.arange(100, dtype=np.uint32).tobytes()
    ids = [engine.new_id(row) for row in range(64)]
    result = engine.step(admit=tuple(Admit(each, prompt) for each in ids))
    assert [each.sequence_id for each in result.admissions] == ids[:1]
    assert {each.reason for each in result.states} == {Reason.PREFIX_PENDING}
    assert core.statistics().held == 7
    engine.step(commit=Lengths(u64(ids[0]), u32(100)))
    result = engine.step(admit=tuple(Admit(each) for each in ids[1:]))
    assert [each.cached_tokens for each in result.admissions] == [96] * 63
    assert core.statistics().held == 7 + 63


def test_a_waiter_takes_over_when_the_writer_ends_or_is_too_slow() -> None:
    core = small_core(100, writer_patience_seconds=1.0)
    engine = Engine(core)
    writer = engine.admit([5] * 50, committed=False)
    waiter, admission = engine.ask([5] * 50)
    assert admission is None
    engine.now = 0.9
    assert engine.ask_again(waiter) is None
    engine.now = 1.1
    admission = engine.ask_again(waiter, committed=False)
    assert admission is not None
    assert admission.hit_reason == HitReason.WRITER_TOO_SLOW
    third, admission = engine.ask([5] * 50)
    engine.finish(writer)
    assert admission is not None or engine.ask_again(third) is not None


def test_a_large_request_is_passed_only_so_often() -> None:
    core = small_core(21, max_bypasses=3)
    engine = Engine(core)
    running = [engine.admit([row] * 64) for row in range(3)]
    large, admission = engine.ask([77] * 200)
    assert admission is None
    passed = 0
    for row in range(20):
        small, admission = engine.ask([100 + row] * 16)
        assert engine.result is not None
        if admission is None:
            assert engine.result.states[-1].reason == Reason.BEHIND_AGED
            engine.finish(small)
            break
        passed += 1
        engine.finish(small)
        engine.ask_again(large)
    assert passed == 4
    engine.finish(*running)
    assert engine.ask_again(large) is not None
    assert engine.ask([5] * 16)[1] is not None


def test_without_a_control_stream_nothing_is_allocated() -> None:
    """I11."""
    core = small_core(20)
    engine = Engine(core)
    sequence = engine.admit([1] * 16)
    core.set_ready(False)
    result = engine.decode(sequence, [2])
    assert result.states[-1].reason == Reason.POOL_NOT_READY
    _, admission = engine.ask([3])
    assert admission is None
    core.set_ready(True)
    engine.step(extend=Lengths(u64(sequence), u32(17)))
    assert len(engine.tables[sequence]) == 2
