"""I8 to I10 of the design, named, in the smallest scenario that would break each: leases, quiescence, restarts."""

import numpy as np
import pytest

from core_driver import (
    Engine,
    model,
    pack,
    small_core,
    u32,
    u64,
)
from kvplane.cache.core import (
    Admit,
    CacheCore,
    CoreConfig,
    Finish,
    HitReason,
    Lengths,
    Observe,
    Reason,
    SequenceState,
)
from kvplane.wire.errors import (
    InvalidArgumentError,
    SessionExpiredError,
)


def test_i8_an_expired_sessions_blocks_come_back_and_its_prefixes_stay() -> None:
    core = small_core(21)
    engine = Engine(core)
    engine.admit([1] * 40)
    assert core.expired(9.9) == []
    assert core.expired(10.0) == [engine.session.session_id]
    with pytest.raises(SessionExpiredError):
        core.renew(engine.session.session_id, 10.0)
    core.end_session(engine.session.session_id)
    core.check_integrity()
    assert core.statistics().quarantined == 3
    other = Engine(core)
    _, admission = other.ask([1] * 40)
    assert admission is not None
    assert admission.cached_tokens == 32
    assert core.statistics().quarantined == 1
    core.session_drained(engine.session.session_id)
    core.check_integrity()
    assert core.statistics().quarantined == 0
    assert core.statistics().held == 3
    # Its rows serve the next session, whose serials start anew.
    assert Engine(core).admit([2]) == 1 << 32


def test_i8_only_messages_renew_a_lease() -> None:
    core = small_core(21)
    engine = Engine(core)
    engine.now = 8.0
    engine.step()
    assert core.expired(17.9) == []
    core.renew(engine.session.session_id, 17.0)
    assert core.expired(26.9) == []
    assert core.expired(27.0) == [engine.session.session_id]


def test_i9_a_finished_sequences_blocks_wait_for_its_last_step() -> None:
    core = small_core(4)
    engine = Engine(core)
    sequence = engine.admit([1] * 40)
    last = engine.step_id
    engine.known.pop(sequence)
    engine.step(completed_step=last - 1, finish=Finish(u64(sequence), u32(1)))
    assert core.statistics().quarantined == 3
    # Quarantine forbids new content, not hits.
    hit = engine.new_id()
    result = engine.step(completed_step=last - 1, admit=(Admit(hit, pack([1] * 33)),))
    assert result.states[-1].reason == Reason.NO_SPACE
    result = engine.step(completed_step=last, admit=(Admit(hit),))
    assert result.admissions[0].cached_tokens == 32


def test_i9_a_victim_of_another_session_keeps_its_blocks_until_it_has_drained() -> None:
    core = small_core(11)
    mine, other = Engine(core), Engine(core)
    first = mine.admit([1] * 80)
    victim = other.admit([2] * 80)
    other.now = mine.now = 1.0
    result = mine.step(observe=Observe(u64(first), u32(1), u32(5)), extend=Lengths(u64(first), u32(81)))
    assert [(each.session_id, each.sequence_id) for each in result.preemptions] == [(other.session.session_id, victim)]
    assert result.states[-1].reason == Reason.BLOCKS_COMING
    assert core.statistics().quarantined == 5
    # The victim's engine does not know yet: its step is no error, and frees nothing.
    result = other.step(extend=Lengths(u64(victim), u32(81)))
    assert [each.sequence_id for each in result.skipped] == [victim]
    assert core.statistics().quarantined == 5
    assert other.ask_again(victim) is None
    assert other.result is not None
    assert other.result.states[-1].reason == Reason.NOT_DRAINED
    other.step(drained=(victim,))
    assert core.statistics().quarantined == 0
    result = mine.step(extend=Lengths(u64(first), u32(81)))
    assert result.states == ()
    assert len(mine.tables[first] or []) == 6
    with pytest.raises(InvalidArgumentError, match="does not run"):
        other.step(extend=Lengths(u64(victim), u32(81)))
    mine.finish(first)
    admission = other.ask_again(victim)
    assert admission is not None
    assert admission.hit_reason in (HitReason.FULL, HitReason.EVICTED)


def test_i10_the_same_steps_give_the_same_blocks() -> None:
    def run() -> list[tuple[object, ...]]:
        core = small_core(40)
        engine = Engine(core)
        out: list[tuple[object, ...]] = []
        for round_ in range(20):
            sequence = engine.admit([round_ % 5] * (20 + round_))
            engine.decode(sequence, [round_] * 5)
            out.append((tuple(engine.tables[sequence]), tuple(engine.generations[sequence]), core.statistics()))
            if round_ % 3:
                engine.finish(sequence)
        return out

    assert run() == run()


def test_i10_a_restart_restores_what_is_whole() -> None:
    core = small_core(21)
    engine = Engine(core)
    engine.finish(engine.admit([1] * 64))
    engine.finish(engine.admit([2] * 48))
    columns = core.state.columns
    ids = np.flatnonzero(columns.indexed)[1:].astype(np.uint32)
    parents = np.array([columns.digest[columns.parent[block]] for block in ids.tolist()])
    # Block 2's row was torn; a row of block 9 repeats block 1's digest.
    kept = ids[ids != 2]
    rows = np.array([*kept.tolist(), 1])
    again = CacheCore(CoreConfig(num_blocks=21, model=model(), incarnation=2))
    restored = again.restore(
        np.array([*kept.tolist(), 9], np.uint32),
        columns.generation[rows],
        columns.digest[rows],
        np.concatenate([parents[ids != 2], parents[:1]]),
        columns.depth[rows],
        columns.namespace[rows],
    )
    again.check_integrity()
    # Block 2 held the chain 1-2-3-4 together.
    assert restored == 4
    statistics = again.statistics()
    assert (statistics.cached, statistics.free) == (4, 16)
    engine = Engine(again)
    _, admission = engine.ask([2] * 50)
    assert admission is not None
    assert admission.cached_tokens == 48
    for row in range(16):
        engine.admit([100 + row] * 16)
    taken = [generation for each in engine.generations.values() for generation in each]
    assert min(taken) >> 32 == 1
    assert {generation >> 32 for generation in taken} == {1, 2}


def test_a_stalled_sequence_is_reported_with_its_reason() -> None:
    engine = Engine(small_core(2))
    sequence = engine.admit([1] * 16)
    result = engine.decode(sequence, [1])
    assert [(each.state, each.reason) for each in result.states] == [(SequenceState.STALLED, Reason.NO_VICTIM)]
