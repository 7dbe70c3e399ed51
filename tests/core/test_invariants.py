"""Each invariant of the design, named, in the smallest scenario that would break it."""

import numpy as np
import pytest

from core_driver import (
    Engine,
    free_list,
    model,
    pack,
    published,
    references,
    sequence_id,
    small_core,
    u32,
    u64,
)
from kvplane.cache.core import (
    Admit,
    Advance,
    CacheCore,
    CoreConfig,
    Finish,
    Fork,
    HitReason,
    Lengths,
    Observe,
    Reason,
    SequenceState,
    Step,
    TransferAck,
)
from kvplane.wire.digests import block_digest
from kvplane.wire.errors import (
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    PriorStepRejectedError,
    SessionExpiredError,
    StepOutOfOrderError,
)
from kvplane.wire.identity import Namespace, root_digest


def test_i1_check_integrity_notices_a_wrong_count() -> None:
    core = small_core(11)
    engine = Engine(core)
    engine.admit([1] * 40)
    core.state.columns.references[1] += 1
    with pytest.raises(InternalError, match="I1"):
        core.check_integrity()


def test_i1_the_states_add_up_at_every_moment() -> None:
    core = small_core(11)
    engine = Engine(core, settles=False)
    engine.admit([1] * 40)
    other = engine.admit([2] * 40)
    engine.finish(other)
    statistics = core.statistics()
    assert statistics.free + statistics.cached + statistics.held + statistics.quarantined == 10
    # Two full blocks of the finished one are pinned by their seals, its tail is free.
    assert (statistics.held, statistics.free) == (5, 5)
    engine.settle()
    assert core.statistics().cached == 2


def test_i2_a_block_gets_a_new_generation_with_each_occupant() -> None:
    core = small_core(3, incarnation=7)
    engine = Engine(core)
    first = engine.admit([1] * 20)
    assert engine.generations[first] == [(7 << 32) + 1] * 2
    engine.finish(first)
    second = engine.admit([2] * 20)
    assert engine.generations[second] == [(7 << 32) + 2] * 2


def test_i2_a_block_whose_generations_are_used_up_is_retired() -> None:
    core = small_core(4)
    core.state.columns.generation[1] = (1 << 32) + 0xFFFF_FFFE
    engine = Engine(core)
    sequence = engine.admit([1] * 20)
    assert engine.generations[sequence][0] == (1 << 32) + 0xFFFF_FFFF
    engine.finish(sequence)
    assert core.state.pool.retired == {1}
    assert 1 not in free_list(core)
    assert 1 not in engine.tables.get(engine.admit([2] * 20), [])
    with pytest.raises(InvalidArgumentError, match="never fit a pool of 2"):
        engine.ask([3] * 40)


def test_i3_nothing_is_hit_before_its_seal_is_acknowledged() -> None:
    core = small_core(30)
    engine = Engine(core, settles=False)
    writer = engine.admit([1] * 40, committed=False)
    waiter, admission = engine.ask([1] * 40)
    assert admission is None
    engine.commit(writer, 40)
    assert engine.ask_again(waiter) is None
    batch = core.take_seals()
    assert batch is not None
    assert batch.block_ids.tolist() == [1, 2]
    assert batch.depths.tolist() == [0, 1]
    assert batch.generations.tolist() == engine.generations[writer][:2]
    root = root_digest(model(), Namespace(), 0)
    first = block_digest(root, pack([1] * 16))
    assert batch.digests == first + block_digest(first, pack([1] * 16))
    assert batch.parent_digests == root + first
    assert engine.ask_again(waiter) is None
    core.acknowledge_seals(batch.seal_id)
    admission = engine.ask_again(waiter)
    assert admission is not None
    assert admission.cached_tokens == 32
    with pytest.raises(InvalidArgumentError, match="seal_id"):
        core.acknowledge_seals(batch.seal_id)


def test_i3_a_block_that_a_shard_could_not_seal_is_not_published_and_nor_is_its_child() -> None:
    core = small_core(30)
    engine = Engine(core, settles=False)
    engine.admit([1] * 64)
    batch = core.take_seals()
    assert batch is not None
    core.acknowledge_seals(batch.seal_id, np.array([True, False, True, True]))
    core.check_integrity()
    assert published(core, [1, 2, 3, 4]) == [True, False, False, False]
    _, admission = engine.ask([1] * 64)
    assert admission is not None
    assert admission.cached_tokens == 16


def test_i3_a_finished_writers_seals_are_still_published() -> None:
    core = small_core(30)
    engine = Engine(core, settles=False)
    engine.finish(engine.admit([1] * 40))
    assert core.statistics().held == 2
    engine.settle()
    assert core.statistics().cached == 2
    assert engine.ask([1] * 40)[1] is not None


def test_i4_only_leaves_go_even_if_a_child_was_sealed_long_after_its_parent() -> None:
    core = small_core(4)
    engine = Engine(core, settles=False)
    sequence = engine.admit([1] * 31)
    first = core.take_seals()
    engine.step(observe=Observe(u64(sequence), u32(1), u32(1)), extend=Lengths(u64(sequence), u32(32)))
    engine.commit(sequence, 32)
    engine.finish(sequence)
    second = core.take_seals()
    assert first is not None
    assert second is not None
    core.acknowledge_seals(first.seal_id)
    core.acknowledge_seals(second.seal_id)
    core.check_integrity()
    assert free_list(core) == [3, 1, 2]
    other = engine.admit([2] * 20)
    # Block 1 was released first and has a child: its child goes, and it stays.
    assert engine.tables[other] == [3, 2]
    assert published(core, [1, 2]) == [True, False]


def test_i4_identical_blocks_have_one_canonical_and_its_chain_stays() -> None:
    core = small_core(21)
    engine = Engine(core)
    # Neither may read, so both write; the second one's child hangs below the first one's block.
    first = engine.admit([1] * 20, read_cache=False)
    second = engine.admit([1] * 40, read_cache=False)
    engine.finish(first)
    assert published(core, engine.tables[second]) == [False, True, False]
    assert core.statistics().cached == 0
    engine.finish(second)
    assert core.statistics().cached == 2
    assert engine.ask([1] * 40)[1] is not None


def test_i5_a_fork_shares_full_blocks_and_copies_the_tail() -> None:
    core = small_core(21)
    engine = Engine(core)
    parent = engine.admit([1] * 40)
    one, two = engine.fork(parent, 2)
    assert engine.result is not None
    copies = engine.result.copies
    assert engine.tables[one][:2] == engine.tables[two][:2] == engine.tables[parent][:2]
    # Three tables and two pins on the shared blocks, one table and two pins on the parent's tail.
    assert references(core, engine.tables[parent]) == [5, 5, 3]
    assert [(copy.source_id, copy.num_slots) for copy in copies] == [(engine.tables[parent][2], 8)] * 2
    assert [copy.destination_id for copy in copies] == [engine.tables[one][2], engine.tables[two][2]]
    engine.finish(parent)
    # The source outlives its owner until both copies have run.
    assert references(core, [copies[0].source_id]) == [2]
    engine.step(transfers=tuple(TransferAck(copy.op_id) for copy in copies))
    assert references(core, [copies[0].source_id]) == [0]
    engine.decode(one, [7] * 10)
    engine.decode(two, [8] * 10)
    assert published(core, [engine.tables[one][2], engine.tables[two][2]]) == [True, True]
    engine.finish(one, two)


def test_i5_a_child_whose_copy_failed_is_computed_again() -> None:
    core = small_core(21)
    engine = Engine(core)
    parent = engine.admit([1] * 40)
    (child,) = engine.fork(parent)
    assert engine.result is not None
    (copy,) = engine.result.copies
    result = engine.step(transfers=(TransferAck(copy.op_id, succeeded=False),), extend=Lengths(u64(child), u32(50)))
    assert result.states[0].reason == Reason.COPY_FAILED
    assert [each.sequence_id for each in result.skipped] == [child]
    admission = engine.ask_again(child)
    assert admission is not None
    assert admission.cached_tokens == 32


def test_i5_a_fork_that_does_not_fit_waits_with_its_parents_tokens() -> None:
    core = small_core(4)
    engine = Engine(core)
    parent = engine.admit([1] * 40)
    (child,) = engine.fork(parent)
    assert engine.result is not None
    assert engine.result.states[-1].reason == Reason.NO_SPACE
    engine.finish(parent)
    admission = engine.ask_again(child)
    assert admission is not None
    assert (admission.cached_tokens, admission.num_slots) == (32, 40)


def test_i5_a_fork_at_a_block_boundary_copies_nothing() -> None:
    core = small_core(4)
    engine = Engine(core)
    parent = engine.admit([1] * 32)
    (child,) = engine.fork(parent)
    assert engine.result is not None
    assert engine.result.copies == ()
    assert engine.tables[child] == engine.tables[parent]


BAD_STEPS = [
    ("advance.sequence_ids[1]", {"advance": Advance(u64(1 << 32, 9 << 32), u32(1, 2), u32(0, 0), u32(1, 1))}),
    (
        "advance.sequence_ids[1]",
        {"advance": Advance(u64(1 << 32, 1 << 32), u32(1, 2), u32(40, 40), u32(1, 1))},
    ),
    ("advance.tokens", {"advance": Advance(u64(1 << 32), u32(1, 2), u32(40), u32(41))}),
    ("advance.num_committed[0]", {"advance": Advance(u64(1 << 32), u32(1), u32(42), u32(41))}),
    ("advance.num_committed[0]", {"advance": Advance(u64(1 << 32), u32(1), u32(39), u32(41))}),
    ("advance.num_slots[0]", {"advance": Advance(u64(1 << 32), u32(1), u32(40), u32(0xFFFF_FFFF))}),
    ("advance.num_slots[0]", {"advance": Advance(u64(1 << 32), u32(1), u32(40), u32(1025 * 16 + 49))}),
    ("observe.sequence_ids[0]", {"observe": Observe(u64(5), u32(1), u32(1))}),
    ("observe.counts", {"observe": Observe(u64(1 << 32), u32(1, 2), u32(1))}),
    ("observe.counts[0]", {"observe": Observe(u64(1 << 32), u32(0), u32())}),
    ("observe.tokens", {"observe": Observe(u64(1 << 32), u32(2), u32(1))}),
    ("commit.num_tokens[0]", {"commit": Lengths(u64(1 << 32), u32(41))}),
    ("commit.num_tokens[0]", {"commit": Lengths(u64(1 << 32), u32(39))}),
    ("commit.sequence_ids[0]", {"commit": Lengths(u64((1 << 32) + 1), u32(1))}),
    ("rollback.num_tokens[0]", {"rollback": Lengths(u64(1 << 32), u32(39))}),
    ("rollback.num_tokens[0]", {"rollback": Lengths(u64(1 << 32), u32(41))}),
    ("forks[0].parent_id", {"forks": (Fork(7 << 32, (3,)),)}),
    ("forks[0].child_ids[0]", {"forks": (Fork(1 << 32, (1 << 32,)),)}),
    ("forks[0].child_ids[1]", {"forks": (Fork(1 << 32, ((1 << 32) + 9, (1 << 32) + 9)),)}),
    ("finish.sequence_ids[0]", {"finish": Finish(u64(8 << 32), u32(1))}),
    ("finish.reasons", {"finish": Finish(u64(1 << 32), u32())}),
    ("extend.sequence_ids[0]", {"extend": Lengths(u64((1 << 32) + 64), u32(1))}),
    ("extend.num_slots[0]", {"extend": Lengths(u64(1 << 32), u32(1 << 21))}),
    ("admit[0].sequence_id", {"admit": (Admit(1 << 32, pack([1])),)}),
    ("admit[0].sequence_id", {"admit": (Admit(1 << 32),)}),
    ("admit[0].sequence_id", {"admit": (Admit((1 << 32) + 5),)}),
    ("admit[0].sequence_id", {"admit": (Admit((1 << 32) + 64, pack([1])),)}),
    ("admit[0].sequence_id", {"admit": (Admit(6, pack([1])),)}),
    ("admit[1].sequence_id", {"admit": (Admit((1 << 32) + 5, pack([1])), Admit((1 << 32) + 5, pack([1])))}),
    ("admit[0].tokens", {"admit": (Admit((1 << 32) + 5, b"abc"),)}),
    ("admit[0].tokens", {"admit": (Admit((1 << 32) + 5, pack([1] * 321)),)}),
    ("admit[0].num_slots", {"admit": (Admit((1 << 32) + 5, pack([1]), num_slots=1 << 30),)}),
    ("admit[0].max_hit_tokens", {"admit": (Admit((1 << 32) + 5, pack([1]), max_hit_tokens=-1),)}),
    ("transfers[0].op_id", {"transfers": (TransferAck(3),)}),
    ("drained[0]", {"drained": (1 << 32,)}),
    ("completed_step", {"completed_step": 99}),
    (
        "finish.sequence_ids[0]",
        {
            "advance": Advance(u64(1 << 32), u32(1), u32(40), u32(41)),
            "finish": Finish(u64(1 << 32), u32(1)),
        },
    ),
    (
        "extend.sequence_ids[0]",
        {"finish": Finish(u64(1 << 32), u32(1)), "extend": Lengths(u64(1 << 32), u32(1))},
    ),
    ("forks[0].parent_id", {"forks": (Fork((1 << 32) + 1, ((1 << 32) + 9,)),)}),
]


@pytest.mark.parametrize(("field", "operations"), BAD_STEPS)
def test_i6_a_bad_step_is_refused_whole_naming_the_field(field: str, operations: dict[str, object]) -> None:
    core = small_core(21)
    engine = Engine(core)
    running = engine.admit([1] * 40)
    assert running == 1 << 32
    engine.ask([2] * 40, max_admissions=0)
    before = core.statistics(), engine.tables, core.state.rows.known.tolist(), core.state.rows.ids.tolist()
    # A good operation before the bad one must not be applied either.
    counted = {"observe", "advance", "commit", "rollback"} & operations.keys()
    good = {} if counted else {"observe": Observe(u64(1 << 32), u32(1), u32(5))}
    with pytest.raises(InvalidArgumentError) as caught:
        engine.step(**good, **operations)
    assert [violation.field for violation in caught.value.violations] == [field]
    after = core.statistics(), engine.tables, core.state.rows.known.tolist(), core.state.rows.ids.tolist()
    assert before == after
    # The id is spent, and the stream goes on.
    engine.decode(running, [3])


def test_i6_an_unknown_namespace_is_named() -> None:
    engine = Engine(small_core(21))
    with pytest.raises(Exception, match=r"admit\[0\].namespace_id"):
        engine.ask([1], namespace_id=3)


def test_i6_a_sequence_finished_or_reused_is_unknown() -> None:
    engine = Engine(small_core(21))
    first = engine.admit([1])
    engine.finish(first)
    with pytest.raises(InvalidArgumentError, match="serial 1 was used before"):
        engine.step(admit=(Admit(first, pack([1])),))
    second = engine.admit([1])
    assert second == sequence_id(0, 2)
    with pytest.raises(InvalidArgumentError, match="unknown or finished"):
        engine.step(commit=Lengths(u64(first), u32(1)))


def test_i7_a_repeated_step_answers_what_it_answered() -> None:
    core = small_core(21)
    session = core.open_session(0.0).session_id
    step = Step(1, admit=(Admit(1 << 32, pack([1] * 20)),))
    result = core.step(session, step, 0.0)
    assert core.step(session, step, 0.0) is result
    assert core.statistics().held == 2
    bad = Step(2, last_seen_step=1, commit=Lengths(u64(7 << 32), u32(1)))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            core.step(session, bad, 0.0)
    with pytest.raises(StepOutOfOrderError):
        core.step(session, Step(5, last_seen_step=2), 0.0)
    with pytest.raises(StepOutOfOrderError):
        core.step(session, step, 0.0)


def test_i7_steps_behind_a_rejected_one_are_rejected_until_it_was_seen() -> None:
    core = small_core(21)
    session = core.open_session(0.0).session_id
    core.step(session, Step(1), 0.0)
    with pytest.raises(InvalidArgumentError):
        core.step(session, Step(2, last_seen_step=1, commit=Lengths(u64(7 << 32), u32(1))), 0.0)
    with pytest.raises(PriorStepRejectedError):
        core.step(session, Step(3, last_seen_step=1, admit=(Admit(1 << 32, pack([1])),)), 0.0)
    assert core.statistics().held == 0
    core.step(session, Step(4, last_seen_step=2), 0.0)


def test_i7_at_most_four_steps_are_unanswered() -> None:
    core = small_core(21)
    session = core.open_session(0.0).session_id
    for step_id in range(1, 5):
        core.step(session, Step(step_id), 0.0)
    with pytest.raises(LimitExceededError):
        core.step(session, Step(5), 0.0)
    core.step(session, Step(5, last_seen_step=1), 0.0)


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
