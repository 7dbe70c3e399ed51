"""The cache service is killed and comes back: what is kept, what goes on, what is never handed out twice."""

import pytest

from kvplane.v1 import types_pb2
from recovery.conftest import MakeWorld
from recovery_engine import RecoveringEngine
from service_rig import wait_until
from wire_engine import A, B, WireEngine, admit, advance, commit, finish, new_sequence, sequence_id

ATTACHED, REMOTE = types_pb2.SESSION_MODE_ATTACHED, types_pb2.SESSION_MODE_REMOTE
PROMPT = list(range(100, 140))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_sealed_blocks_are_hit_after_a_restart(world: MakeWorld, num_shards: int) -> None:
    """A session that was closed leaves its prefix; the next one, on the next start of the service, hits it."""
    here = world(num_shards=num_shards)
    engine = RecoveringEngine(here.service.control(), here.shards, ttl_ms=2000)
    engine.step(admit=admit(new_sequence(A, PROMPT)))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    engine.step(finish=finish(A))
    engine.step()
    here.restart()
    engine.come_back(here.service.control())
    here.service.wait_ready()
    assert here.stats().cached_blocks == 2
    engine.step(admit=admit(new_sequence(B, [*PROMPT, 1, 2, 3])))
    assert engine.admitted()[B] == (32, "FULL")
    assert all(shard.incarnation > 1 for shard in here.shards)


@pytest.mark.parametrize("mode", [ATTACHED, REMOTE])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_running_sequences_go_on(world: MakeWorld, mode: types_pb2.SessionMode.ValueType, num_shards: int) -> None:
    """Same session, same sequences, same tables, same lengths; epochs are higher and steps go on counting."""
    here = world(num_shards=num_shards)
    engine = RecoveringEngine(here.service.control(), here.shards, mode=mode)
    before = engine.opened
    engine.step(admit=admit(new_sequence(A, PROMPT), new_sequence(B, [*PROMPT[:32], 1, 2])))
    engine.step(advance=advance(7, (A, 40, 41)))
    engine.settle()
    tables = {sequence: list(held.table) for sequence, held in engine.held.items()}
    here.restart()
    engine.come_back(here.service.control(), parts=2)
    assert engine.opened.session_id == before.session_id
    assert engine.opened.resume_token == before.resume_token
    assert engine.opened.session_secret == before.session_secret
    assert engine.opened.lease_epoch > before.lease_epoch
    assert engine.opened.stream_epoch > before.stream_epoch
    assert engine.cuts == {}
    here.service.check_integrity()
    here.service.wait_ready()
    stats = here.stats()
    assert (stats.held_blocks, stats.running_sequences) == (
        len({block for table in tables.values() for block in table}),
        1 + bool(tables[B]),
    )
    engine.step(advance=advance(8, (A, 41, 80)))
    assert engine.held[A].table[:3] == tables[A]
    assert len(engine.held[A].table) == 5
    engine.step(commit=commit((A, 42)))
    engine.step(finish=finish(A))
    engine.step()
    if engine.held[B].table:
        engine.step(finish=finish(B))
        engine.step()
    assert here.stats().held_blocks == 0


def test_no_generation_is_handed_out_twice(world: MakeWorld) -> None:
    """Over many starts, whatever the engine did with its blocks."""
    here = world(num_blocks=9)
    engine = RecoveringEngine(here.service.control(), here.shards)
    seen: dict[tuple[int, int], int] = {}
    for start in range(4):
        for serial in range(1, 4):
            sequence = sequence_id(0, 10 * start + serial)
            engine.step(admit=admit(new_sequence(sequence, [start, serial, *range(60)])))
            for block in engine.held[sequence].table:
                assert block not in seen, f"start {start}: {block} again"
                seen[block] = start
            if serial == 2:
                engine.step(commit=commit((sequence, 62)))
                engine.settle()
            engine.step(finish=finish(sequence))
            engine.step()
        here.restart()
        engine.deferred.clear()
        engine.come_back(here.service.control())
        here.service.wait_ready()
    assert len(seen) == 48


def test_a_removed_namespace_stays_removed(world: MakeWorld) -> None:
    """Damaged bytes raise every version; a restart takes the highest and brings nothing back."""
    here = world()
    engine = RecoveringEngine(here.service.control(), here.shards)
    engine.step(admit=admit(new_sequence(A, PROMPT)))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    engine.step(finish=finish(A))
    here.shards[0].damaged([1])
    for _ in range(200):
        engine.step()
        if here.stats().cached_blocks == 0:
            break
    assert here.stats().cached_blocks == 0
    assert len(here.shards[0].sealed_blocks()) == 2, "the rows are still there"
    here.restart()
    engine.come_back(here.service.control())
    here.service.wait_ready()
    engine.step(admit=admit(new_sequence(sequence_id(0, 2), PROMPT)))
    assert engine.admitted()[sequence_id(0, 2)][0] == 0
    assert here.shards[0].sealed_blocks() == [], "rows that nobody can hit are voided"


def test_a_row_that_one_shard_lacks_is_not_hit(world: MakeWorld) -> None:
    """Rows count when they are the same on all shards; a child goes with its parent."""
    here = world(num_shards=2)
    engine = RecoveringEngine(here.service.control(), here.shards)
    engine.step(admit=admit(new_sequence(A, PROMPT)))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    first = engine.held[A].table[0][0]
    engine.step(finish=finish(A))
    engine.step()
    view = here.shards[1].view
    assert view is not None
    view.blocks["flags"][first] = 0
    here.restart()
    engine.come_back(here.service.control())
    here.service.wait_ready()
    assert here.stats().cached_blocks == 0
    assert here.stats().free_blocks == 63


def test_one_of_two_shards_is_restarted_with_its_memory(world: MakeWorld) -> None:
    """The cache service lives on; it asks both shards again, and the sessions."""
    here = world(num_shards=2)
    engine = RecoveringEngine(here.service.control(), here.shards)
    engine.step(admit=admit(new_sequence(A, PROMPT)))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    table = list(engine.held[A].table)
    here.shards[0].restart(keep=True)
    wait_until(lambda: here.shards[1].error is not None, "the other shard is sent away")
    here.shards[1].start()
    engine.come_back(here.service.control())
    here.service.wait_ready()
    assert engine.cuts == {}
    assert engine.held[A].table == table
    assert len({shard.incarnation for shard in here.shards}) == 1
    engine.step(finish=finish(A))
    engine.step()
    assert here.stats().cached_blocks == 2


def test_without_sessions_the_pool_opens_at_once(world: MakeWorld) -> None:
    """Nobody is waited for."""
    here = world()
    here.restart(wait=True)
    engine = WireEngine(here.service.control())
    engine.step(admit=admit(new_sequence(A, PROMPT)))
    assert engine.states() == {}
    assert engine.opened.stream_epoch == here.shards[0].incarnation
