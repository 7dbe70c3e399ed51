"""I6 and I7 of the design: steps are whole, named when bad, and answered once."""

import pytest

from core_driver import (
    Engine,
    pack,
    sequence_id,
    small_core,
    u32,
    u64,
)
from kvplane.cache.core import (
    Admit,
    Advance,
    Finish,
    Fork,
    Lengths,
    Observe,
    Step,
    TransferAck,
)
from kvplane.wire.errors import (
    InvalidArgumentError,
    LimitExceededError,
    PriorStepRejectedError,
    StepOutOfOrderError,
)

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
