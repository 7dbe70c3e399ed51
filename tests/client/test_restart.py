"""A cache service that dies and comes back: sessions of the SDK go on by themselves, with what they had."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_rig import OpenSession
from kvplane.client import HitReason, StepResult
from kvplane.client.sequences import row_of
from recovery.conftest import World
from session_walk import Walk, same_as_service

PROMPT = np.arange(40, dtype=np.uint32)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds; invariants are proved at the end."""
    made: list[World] = []

    def make(num_blocks: int = 64, **settings: Any) -> World:
        made.append(World(tmp_path, num_blocks, 1, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def core_of(world: World) -> Any:
    return world.service.server.plane.pools["default"].core


def launch(session: Any, world: World) -> None:
    """What a shard knows once an engine launched on its tables: stamps, and a remote session's grants."""
    table = session.sequences
    for shard in world.shards:
        shard.granted = {key: held for key, held in shard.granted.items() if key[0] != session.session_id}
        for row in table.rows_in_use.tolist():
            held = slice(0, int(table.num_blocks[row]))
            blocks, generations = table.blocks[row, held].astype(np.int64), table.generations[row, held]
            shard.stamp(blocks, np.maximum(shard.stamps[blocks], generations))
            if session.state.mode == "remote":
                named = list(zip(blocks.tolist(), generations.tolist(), strict=True))
                shard.granted[session.session_id, int(table.ids[row])] = named


class StampingWalk(Walk):
    """Stamps what it was given before it goes on, as an engine does that writes: unstamped slots are cut."""

    def __init__(self, session: Any, seed: int, world: World) -> None:
        super().__init__(session, seed)
        self._world = world
        self.cuts = 0

    def note(self, result: StepResult) -> None:
        for cut in result.cuts:
            self.cuts += 1
            lengths = self.running.get(cut.sequence_id)
            if lengths is None:
                continue  # ended by a step that was on its way
            if cut.num_slots:
                lengths[1] = min(lengths[1], cut.num_slots)
                self.rests[cut.sequence_id] = result.step_id
            else:
                del self.running[cut.sequence_id]
                self.waiting.append(cut.sequence_id)
        super().note(result)
        launch(self.session, self._world)


@pytest.mark.parametrize("mode", ["attached", "remote"])
def test_a_sequence_goes_on_and_prefixes_stay(
    world: Callable[..., World], open_session: OpenSession, mode: str
) -> None:
    """Kill and restart between two steps: the running sequence keeps its table, the published prefix is hit, and the
    engine does nothing for it."""
    made = world()
    session = open_session(address=made.service.address, mode=mode)
    draft = session.draft()
    sequence_id = draft.admit(PROMPT)
    session.run(draft)
    table = session.sequences
    row = row_of(sequence_id)
    blocks = table.blocks[row, :3].copy()
    launch(session, made)
    draft = session.draft()
    draft.commit(sequence_id, 40)
    session.run(draft)
    session.flush()
    made.restart()
    draft = session.draft()
    draft.advance(sequence_id, 7, 40, 42)
    session.run(draft)
    assert table.blocks[row, :3].tolist() == blocks.tolist()
    assert table.known[row] == 41
    draft = session.draft()
    second = draft.admit(PROMPT)
    result = session.run(draft)
    while not result.admitted:
        draft = session.draft()
        draft.readmit(second)
        result = session.run(draft)
    assert (result.admitted[0].cached_tokens, result.admitted[0].hit_reason) == (32, HitReason.FULL)
    made.service.on_loop(lambda: same_as_service(session, core_of(made)))


@pytest.mark.parametrize("mode", ["attached", "remote"])
@pytest.mark.parametrize("seed", range(3))
def test_restarts_in_the_middle_of_anything(
    world: Callable[..., World], open_session: OpenSession, mode: str, seed: int
) -> None:
    """Random steps with several on their way while the service dies and comes back: afterwards both sides hold the same
    tokens, lengths and tables, and nothing is left at the end."""
    made = world(24)
    session = open_session(address=made.service.address, mode=mode, max_sequences=16)
    walk = StampingWalk(session, seed, made)
    for round_ in range(5):
        walk.steps(12)
        if round_ % 2:
            made.restart()  # between steps
        else:
            for _ in range(3):  # with steps on their way
                session.submit(walk._draft())  # noqa: SLF001 - its own test
            made.restart()
        while session.state.unanswered:
            walk.note(session.collect())
        walk.note(session.run(session.draft()))
        made.service.on_loop(lambda: same_as_service(session, core_of(made)))
    walk.steps(10)
    made.service.on_loop(lambda: same_as_service(session, core_of(made)))
    walk.finish_all()
    session.flush()
    stats = session.run(session.draft()).pool
    assert stats.held_blocks == stats.quarantined_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == 23


def test_an_idle_session_resumes_by_its_heartbeat(world: Callable[..., World], open_session: OpenSession) -> None:
    """A session without sequences sends no steps; it is there after a restart and longer than its time to live."""
    made = world()
    session = open_session(address=made.service.address, ttl_seconds=2.0)
    made.restart()
    deadline = time.monotonic() + 10
    while session.state.lease_epoch == 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2.5)
    draft = session.draft()
    draft.admit(PROMPT)
    assert session.run(draft).admitted


def test_two_sessions_come_back_and_one_does_not_wait_for_ever(
    world: Callable[..., World], open_session: OpenSession
) -> None:
    """The pool opens when both have declared; admissions wait meanwhile and are told why."""
    made = world()
    first, second = (open_session(address=made.service.address, ttl_seconds=3.0) for _ in range(2))
    ids = []
    for session in (first, second):
        draft = session.draft()
        ids.append(draft.admit(PROMPT, read_cache=False))
        session.run(draft)
    made.restart()
    draft = first.draft()
    later = draft.admit(np.arange(100, 120))
    result = first.run(draft)
    assert not result.admitted
    thread = threading.Thread(target=lambda: second.run(second.draft()))
    thread.start()
    thread.join()
    deadline = time.monotonic() + 10
    while not result.admitted:
        assert time.monotonic() < deadline
        draft = first.draft()
        draft.readmit(later)
        result = first.run(draft)
    assert result.admitted[0].sequence_id == later
