"""An engine that computes while its step is on its way: its tables are its own until it has read the answer."""

from pathlib import Path

import pytest

from compute_access import MODES, rig
from kvplane.client import SequenceState
from kvplane.client.sequences import row_of
from kvplane.wire.errors import PreconditionError


@pytest.mark.parametrize("mode", MODES)
def test_what_yields_in_a_step_is_nobody_elses_before_its_answer_is_read(tmp_path: Path, mode: str) -> None:
    """One session preempts a sequence of its own; until it has read that, it goes on computing on the sequence's
    blocks, and another session's prompt has to wait for them."""
    with rig(tmp_path, change=lambda _: {"max_blocks": 6}) as made:
        engine, other = made.engine(mode), made.engine(mode)
        kept, victim = engine.admit(range(8)), engine.admit(range(20, 31))
        engine.forward(kept)
        engine.forward(victim, ends={victim: 10})
        draft = engine.session.draft()
        draft.extend(kept, 12)
        engine.session.submit(draft)  # the five blocks are taken: the later sequence yields
        asking = other.session.draft()
        asked = other.session.sequences
        prompt = list(range(40, 44))
        new = asking.admit(prompt, read_cache=False)
        result = other.session.run(asking)
        if result.admitted:
            other.tokens[new], other.written[new] = prompt, 0
            other.forward(new)
        engine.forward(victim)  # every output is compared
        assert asked.state[row_of(new)] == SequenceState.WAITING
        result = engine.session.collect()
        assert [each.sequence_id for each in result.preemptions] == [victim]
        engine.session.run(engine.session.draft())
        again = other.session.draft()
        again.readmit(new)
        (admission,) = other.session.run(again).admitted
        other.tokens[new], other.written[new] = prompt, admission.cached_tokens
        other.forward(new)


def test_a_step_that_was_to_be_waited_for_is_collected_before_the_next_plan(tmp_path: Path) -> None:
    """`run` says that nothing is launched meanwhile: after a timeout that still holds."""
    with rig(tmp_path) as made:
        engine = made.engine()
        sequence = engine.admit(range(8))
        engine.forward(sequence, ends={sequence: 6})
        session = engine.session
        session._link.submit(session.draft(), overlapped=False)  # noqa: SLF001 - as `run` leaves it when it is late
        with pytest.raises(PreconditionError, match="collect"):
            engine.forward(sequence)
        session.collect()
        engine.forward(sequence)


@pytest.mark.parametrize("mode", MODES)
def test_slots_and_yielding_in_one_step(tmp_path: Path, mode: str) -> None:
    """A sequence gets the last block, and yields to another one of the same step: shards take that grant."""
    with rig(tmp_path, change=lambda _: {"max_blocks": 6}) as made:
        engine = made.engine(mode)
        kept, victim = engine.admit(range(8)), engine.admit(range(20, 28))
        engine.forward(kept, victim, ends={kept: 7, victim: 7})
        draft = engine.session.draft()
        draft.extend([victim, kept], [12, 12])
        result = engine.session.run(draft)
        assert [each.sequence_id for each in result.preemptions] == [victim]
        engine.forward(kept)
