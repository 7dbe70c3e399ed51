"""What engines declare is judged: wrong digests, old generations, blocks of others, blocks that came too late."""

from typing import Any

import numpy as np
import pytest

from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire import errors
from recovery.conftest import MakeWorld, World
from recovery_engine import RecoveringEngine, block_list
from wire_engine import A, B, C, admit, advance, commit, finish, new_sequence, u32, u64

ATTACHED, REMOTE = types_pb2.SESSION_MODE_ATTACHED, types_pb2.SESSION_MODE_REMOTE
PROMPT = list(range(100, 140))


def running(
    here: World, mode: types_pb2.SessionMode.ValueType = ATTACHED, first: int = 100, **options: Any
) -> RecoveringEngine:
    """A session whose sequence A has two sealed blocks and a third with eight tokens."""
    engine = RecoveringEngine(here.service.control(), here.shards, mode=mode, **options)
    engine.step(admit=admit(new_sequence(A, list(range(first, first + 40)))))
    engine.step(advance=advance(7, (A, 40, 41)))
    engine.settle()
    return engine


def test_other_tokens_are_cut_where_they_differ(world: MakeWorld) -> None:
    """A sealed block must have the digest of the tokens; what is cut is back once the engine's work is done."""
    here = world()
    engine = running(here)
    engine.held[A].tokens[20] = 9
    here.restart()
    engine.come_back(here.service.control(), completed=0)
    assert engine.cuts == {A: (16, "DIGEST_DIFFERS")}
    here.service.check_integrity()
    here.service.wait_ready()
    stats = here.stats()
    assert (stats.held_blocks, stats.quarantined_blocks, stats.cached_blocks) == (1, 2, 0)
    engine.step(extend=step_pb2.Extend(sequence_ids=u64([A]), num_slots=u32([41])))
    assert len(engine.held[A].table) == 3
    stats = here.stats()
    # Reported as complete with that step: the sealed one is cached again, the other one was free.
    assert (stats.held_blocks, stats.quarantined_blocks, stats.cached_blocks) == (3, 0, 1)
    engine.step(commit=commit((A, 41)))
    engine.settle()
    assert len(here.shards[0].sealed_blocks()) == 3


def test_a_first_block_that_is_wrong_leaves_nothing(world: MakeWorld) -> None:
    """It is preempted, and admitted again like any other."""
    here = world()
    engine = running(here)
    engine.held[A].tokens[0] = 9
    here.restart()
    engine.come_back(here.service.control())
    assert engine.cuts == {A: (0, "DIGEST_DIFFERS")}
    here.service.wait_ready()
    engine.step(admit=admit(again=[A]))
    assert engine.admitted()[A][0] == 0
    assert len(engine.held[A].table) == 3


def test_reserved_slots_that_were_never_written_are_cut(world: MakeWorld) -> None:
    """Their generations cannot be stamped any more; committed tokens are not touched."""
    here = world()
    engine = running(here)
    step = engine.request(extend=step_pb2.Extend(sequence_ids=u64([A]), num_slots=u32([80])))
    engine.send(step)
    engine.answered(step, engine.receive(), stamp=False)
    assert len(engine.held[A].table) == 5
    here.restart()
    engine.come_back(here.service.control())
    assert engine.cuts == {A: (48, "NEVER_WRITTEN")}
    assert engine.held[A].committed == 40
    here.service.wait_ready()
    assert here.stats().quarantined_blocks == 0
    engine.step(extend=step_pb2.Extend(sequence_ids=u64([A]), num_slots=u32([80])))
    assert len(engine.held[A].table) == 5
    assert all(mark >> 32 == here.shards[0].incarnation for _, mark in engine.held[A].table[3:])


def test_an_old_generation_is_cut(world: MakeWorld) -> None:
    """Somebody has written the block since."""
    here = world()
    engine = running(here)
    block, mark = engine.held[A].table[2]
    here.shards[0].stamp(np.array([block]), np.array([mark + 1], np.uint64))
    here.restart()
    engine.come_back(here.service.control(), completed=0)
    assert engine.cuts == {A: (32, "STALE_GENERATION")}
    assert engine.held[A].committed == 32
    here.service.wait_ready()
    assert here.stats().quarantined_blocks == 0


def test_an_unsealed_block_is_nobody_elses(world: MakeWorld) -> None:
    """The second one that claims it is cut; a sealed one may have many holders."""
    here = world()
    first, second = running(here), running(here)
    assert second.held[A].table[:2] == first.held[A].table[:2], "the second session hit the first one's prefix"
    second.held[A].table = list(first.held[A].table)
    here.restart()
    first.come_back(here.service.control())
    second.come_back(here.service.control())
    assert first.cuts == {}
    assert second.cuts == {A: (32, "CLAIMED_TWICE")}
    here.service.wait_ready()
    here.service.check_integrity()


def test_one_session_cannot_share_what_it_still_writes(world: MakeWorld) -> None:
    """Two sequences may share full blocks of the same tokens, sealed or not, and no other."""
    here = world()
    engine = RecoveringEngine(here.service.control(), here.shards)
    engine.step(admit=admit(new_sequence(A, PROMPT, write_cache=False)))
    engine.step(commit=commit((A, 40)))
    assert here.shards[0].sealed_blocks() == []
    mine = engine.held[A]
    engine.held[B] = type(mine)(list(mine.tokens), 40, 40, list(mine.table), running=True)
    engine.held[C] = type(mine)([*mine.tokens[:16], *range(24)], 40, 40, list(mine.table), running=True)
    here.restart()
    engine.come_back(here.service.control())
    assert engine.cuts == {B: (32, "CLAIMED_TWICE"), C: (16, "CLAIMED_TWICE")}
    here.service.check_integrity()


def test_a_remote_session_has_what_it_was_granted(world: MakeWorld) -> None:
    """An unsealed block that no shard granted to it is not its own, whatever it says."""
    here = world(num_shards=2)
    first, rogue = running(here, REMOTE), running(here, REMOTE, first=500)
    rogue.held[A].table[2] = first.held[A].table[2]
    here.restart()
    rogue.come_back(here.service.control(), completed=0)
    first.come_back(here.service.control())
    assert rogue.cuts == {A: (32, "NOT_GRANTED")}
    assert first.cuts == {}
    here.service.wait_ready()
    assert here.stats().quarantined_blocks == 0, "nor does it hold it back"


def test_a_remote_session_holds_back_what_it_was_granted_alone(world: MakeWorld) -> None:
    """Nobody gets hold of another's blocks by calling them released."""
    here = world()
    first, rogue = running(here, REMOTE), running(here, REMOTE, first=500)
    rogue.deferred = [(rogue.step_id, [first.held[A].table[2], *rogue.held.pop(A).table])]
    here.restart()
    rogue.come_back(here.service.control(), completed=0)
    first.come_back(here.service.control())
    assert first.cuts == {}
    here.service.wait_ready()
    assert here.stats().quarantined_blocks == 3


def test_a_window_moves_on_after_a_restart(world: MakeWorld) -> None:
    """Entries that left a sliding window are null in the declaration, and the table goes on."""
    window = types_pb2.GroupSpec(sliding_window=types_pb2.SlidingWindow(window_tokens=20), block_tokens=16)
    here = world(group=window)
    engine = RecoveringEngine(here.service.control(), here.shards)
    engine.step(admit=admit(new_sequence(A, list(range(100, 170)))))
    engine.step(commit=commit((A, 70)))
    engine.settle()
    table = list(engine.held[A].table)
    assert [block for block, _ in table[:3]] == [0, 0, 0]
    here.restart()
    engine.come_back(here.service.control())
    assert engine.cuts == {}
    here.service.wait_ready()
    assert here.stats().held_blocks == 2
    engine.step(advance=advance(7, (A, 70, 90)))
    assert engine.held[A].table[:5] == table
    engine.step(commit=commit((A, 71)))
    here.service.check_integrity()


def test_released_blocks_wait_for_the_work_on_them(world: MakeWorld) -> None:
    """A sequence was finished while its kernel ran; the restart forgets neither."""
    here = world(num_blocks=8)
    engine = running(here)
    done = engine.seen - 1
    engine.step(finish=finish(A), completed=done)
    assert engine.deferred
    here.restart()
    engine.come_back(here.service.control(), completed=done)
    here.service.wait_ready()
    assert here.stats().quarantined_blocks == 3
    engine.step(admit=admit(new_sequence(B, list(range(900, 900 + 16 * 5)))), completed=done)
    assert engine.states()[B] == ("WAITING", "NO_BLOCKS")
    engine.step(admit=admit(again=[B]))
    assert len(engine.held[B].table) == 5


def test_steps_wait_for_the_declaration(world: MakeWorld) -> None:
    """A step before it is refused, one after it counts on from the last that was sent."""
    here = world()
    engine = running(here)
    here.restart()
    engine.resume(here.service.control())
    opened = engine.open_stream()
    assert opened.declaration_required
    engine.send(engine.request())
    with pytest.raises(errors.PreconditionError) as refused:
        engine.stream.receive()
    assert refused.value.reason == "DECLARATION_REQUIRED"
    engine.declare()
    assert here.state() in ("RECONCILING", "READY")
    step = engine.request()
    assert step.step_id == engine.step_id
    engine.send(step)
    engine.receive()
    engine.stream.send(cache_pb2.StepRequest(declaration=cache_pb2.Declaration(last=True)))

    def hear() -> None:
        while engine.stream.receive().HasField("notice"):
            pass  # the pool has opened

    with pytest.raises(errors.PreconditionError):
        hear()


def test_an_answer_that_was_lost_comes_again(world: MakeWorld) -> None:
    """Until the first step, on every new stream and for every repeated declaration."""
    here = world()
    engine = running(here)
    engine.held[A].tokens[20] = 9
    here.restart()
    result = engine.come_back(here.service.control())
    opened = engine.open_stream()
    assert not opened.declaration_required
    assert engine.receive_declared() == result
    engine.stream.send(cache_pb2.StepRequest(declaration=cache_pb2.Declaration(last=True)))
    assert engine.receive_declared() == result
    engine.step()
    engine.open_stream()
    engine.step()


def test_a_session_that_is_resumed_without_a_restart_gets_its_grants_anew(world: MakeWorld) -> None:
    """Grants of the old lease are refused by the shards: the new one begins with all tables, until a step says that
    they arrived."""
    here = world()
    engine = running(here, REMOTE)
    engine.resume(here.service.control())
    for _ in range(2):
        opened = engine.open_stream()
        assert not opened.declaration_required
        body = step_pb2.GrantBody.FromString(opened.grant.body)
        assert (body.reset, body.lease_epoch) == (True, 2)
        assert dict(engine.granted(body)) == {A: engine.held[A].table}
    engine.step()
    assert not engine.open_stream().HasField("grant")


def test_parts_of_a_stream_that_was_cut_count_for_nothing(world: MakeWorld) -> None:
    """The declaration starts over."""
    here = world()
    engine = running(here)
    here.restart()
    engine.resume(here.service.control())
    engine.open_stream()
    engine.stream.send(cache_pb2.StepRequest(declaration=cache_pb2.Declaration(sequences=engine.declared())))
    engine.stream.close()
    engine.declare()
    assert engine.cuts == {}


def broken(change: Any) -> Any:
    """A declared sequence with a change."""

    def make(engine: RecoveringEngine) -> list[cache_pb2.DeclaredSequence]:
        sequences = engine.declared()
        change(sequences[0])
        return sequences

    return make


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda each: each.sequence.ClearField("tokens"), "sequences[0].sequence.tokens"),
        (lambda each: setattr(each, "num_committed", 99), "sequences[0].num_committed"),
        (lambda each: setattr(each, "num_prompt_tokens", 99), "sequences[0].num_prompt_tokens"),
        (lambda each: setattr(each.sequence, "sequence_id", 1 << 32 | 5000), "sequences[0].sequence.sequence_id"),
        (lambda each: each.table[0].CopyFrom(block_list([(1, 1), (1, 1), (2, 1)])), "sequences[0].table.block_ids"),
        (lambda each: each.table[0].CopyFrom(block_list([(1, 1), (0, 0), (2, 1)])), "sequences[0].table.block_ids"),
        (lambda each: each.table[0].CopyFrom(block_list([(1, 1), (2, 1), (64, 1)])), "sequences[0].table.block_ids"),
        (lambda each: each.table[0].ClearField("generations"), "sequences[0].table[0].generations"),
        (lambda each: setattr(each, "state", step_pb2.SEQUENCE_STATE_WAITING), "sequences[0].table"),
    ],
)
def test_what_cannot_be_is_refused_whole(world: MakeWorld, change: Any, field: str) -> None:
    """The field is named, nothing is changed, and a right declaration still counts."""
    here = world()
    engine = running(here)
    here.restart()
    engine.resume(here.service.control())
    with pytest.raises(errors.InvalidArgumentError) as refused:
        engine.declare(sequences=broken(change)(engine))
    assert refused.value.violations[0].field == f"declaration.{field}"
    assert here.stats().held_blocks == 0
    engine.declare()
    assert engine.cuts == {}
