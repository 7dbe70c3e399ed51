"""A cache service that dies and comes back: sessions of the SDK go on by themselves, with what they had."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from client_rig import PROMPT, OpenSession, core_of, launch
from cut_proxy import CutProxy
from kvplane.client import HitReason, StepResult
from kvplane.client.aio_control import AioCacheControl
from kvplane.client.control import GrpcCacheControl
from kvplane.client.sequences import row_of
from kvplane.v1 import cache_pb2
from kvplane.wire.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from recovery.conftest import World
from service_rig import wait_until
from session_walk import Walk, same_as_service


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


@pytest.mark.parametrize("submitted", ["before", "after"])
def test_the_answer_to_a_declaration_is_lost(
    world: Callable[..., World], open_session: OpenSession, submitted: str
) -> None:
    """The service has taken the declaration, and the stream breaks before it says so: it says it again, and steps go
    on behind it, also one that was made while no stream was open."""
    made = world()
    proxy = CutProxy(made.service.address)
    try:
        session = open_session(address=proxy.address)
        draft = session.draft()
        sequence_id = draft.admit(PROMPT)
        session.run(draft)
        launch(session, made)
        draft = session.draft()
        draft.commit(sequence_id, 40)
        session.run(draft)
        draft = session.draft()
        draft.advance(sequence_id, 7, 40, 64)
        made.die()
        session.submit(draft)
        made.start()
        proxy.delay_seconds = 0.15

        def cut() -> None:
            sessions = made.service.server.plane.pools["default"].sessions
            wait_until(lambda: session.session_id in sessions and sessions[session.session_id].declared, "declared")
            if submitted == "after":
                proxy.refuses = True
            proxy.cut()
            proxy.delay_seconds = 0.0

        cutter = threading.Thread(target=cut)
        cutter.start()
        count = 1
        if submitted == "after":
            with pytest.raises(UnavailableError):
                session.collect(3.0)
            draft = session.draft()
            draft.extend(sequence_id, 80)
            session.submit(draft)
            count, proxy.refuses = 2, False
        results = [session.collect(10.0) for _ in range(count)]
        cutter.join()
        assert [cut.reason for cut in results[0].cuts] in ([], ["NEVER_WRITTEN"])
        assert session.sequences.known[row_of(sequence_id)] == 41
        made.service.on_loop(lambda: same_as_service(session, core_of(made)))
    finally:
        proxy.close()


def test_a_second_restart_while_the_first_is_mended(
    world: Callable[..., World], open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service dies again between the answer to OpenSession and the stream: the engine is told nothing of it."""
    made = world()
    session = open_session(address=made.service.address)
    draft = session.draft()
    sequence_id = draft.admit(PROMPT)
    session.run(draft)
    launch(session, made)
    again = [True]

    def restart_once() -> None:
        again.clear()
        made.restart()

    opened, aio_opened = GrpcCacheControl.open_session, AioCacheControl.open_session

    def open_sync(self: Any, request: Any) -> Any:
        response = opened(self, request)
        if again:
            restart_once()
            _reconnect(lambda: self.list_pools(cache_pb2.ListPoolsRequest()))
        return response

    async def open_aio(self: Any, request: Any) -> Any:
        response = await aio_opened(self, request)
        if again:
            await asyncio.to_thread(restart_once)
            while True:
                try:
                    await self.list_pools(cache_pb2.ListPoolsRequest())
                    return response
                except UnavailableError:
                    await asyncio.sleep(0.01)
        return response

    monkeypatch.setattr(GrpcCacheControl, "open_session", open_sync)
    monkeypatch.setattr(AioCacheControl, "open_session", open_aio)
    made.restart()
    draft = session.draft()
    draft.observe(sequence_id, [7])
    session.run(draft)
    assert not again
    assert session.sequences.known[row_of(sequence_id)] == 41
    made.service.on_loop(lambda: same_as_service(session, core_of(made)))


def test_a_step_that_was_made_without_knowing_a_cut(world: Callable[..., World], open_session: OpenSession) -> None:
    """The first step after the declaration is refused, so nobody was told yet what was cut: the next one commits no
    more than was kept, and its result tells."""
    made = world()
    session = open_session(address=made.service.address)
    draft = session.draft()
    sequence_id = draft.admit(PROMPT)
    session.run(draft)
    row = row_of(sequence_id)
    draft = session.draft()
    draft.commit(sequence_id, 40)
    session.run(draft)
    # Only the first block was stamped: the others cannot have been written.
    table = session.sequences
    for shard in made.shards:
        shard.stamp(table.blocks[row, :1].astype(np.int64), table.generations[row, :1])
    bad = session.draft()
    bad.finish(sequence_id + (9 << 32))
    made.die()
    session.submit(bad)
    made.start()
    with pytest.raises(InvalidArgumentError):
        session.collect()
    draft = session.draft()
    draft.advance(sequence_id, 7, 40, 48)
    result = session.run(draft)
    (cut,) = result.cuts
    assert 0 < cut.num_slots < 40
    assert (table.known[row], table.committed[row]) == (41, cut.num_slots)
    made.service.on_loop(lambda: same_as_service(session, core_of(made)))


def test_a_copy_that_was_lost_is_not_committed(world: Callable[..., World], open_session: OpenSession) -> None:
    """A child's tail was stamped and not copied when the service died. The step on its way says that the child has its
    parent's committed tokens: it has its whole blocks only."""
    made = world()
    session = open_session(address=made.service.address)
    draft = session.draft()
    parent = draft.admit(PROMPT)
    session.run(draft)
    launch(session, made)
    draft = session.draft()
    draft.commit(parent, 40)
    session.run(draft)
    draft = session.draft()
    (child,) = draft.fork(parent)
    assert session.run(draft).copies
    launch(session, made)
    draft = session.draft()
    draft.advance(child, 7, 40, 42)
    made.die()
    session.submit(draft)
    made.start()
    result = session.collect()
    row = row_of(child)
    assert [(cut.sequence_id, cut.num_slots) for cut in result.cuts] == [(child, 32)]
    assert (session.sequences.known[row], session.sequences.committed[row]) == (41, 32)
    made.service.on_loop(lambda: same_as_service(session, core_of(made)))


def _reconnect(call: Callable[[], Any]) -> None:
    while True:
        try:
            call()
            return
        except UnavailableError:
            time.sleep(0.01)


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


def test_a_revocation_of_the_last_service_is_not_acknowledged(
    world: Callable[..., World], open_session: OpenSession
) -> None:
    """It was read, and the result that would have told it never came: the restarted service numbers revocations anew,
    and would take the acknowledgement for another sequence's."""
    made = world(8)
    low, high = (open_session(address=made.service.address) for _ in range(2))
    for session in (low, high):
        session.state.track_plans()
    draft = low.draft()
    victim = draft.admit(np.arange(64), priority=5)
    low.run(draft)
    draft = high.draft()
    needy = draft.admit(np.arange(1000, 1030))
    high.run(draft)
    for session in (low, high):
        launch(session, made)
    draft = high.draft()
    draft.commit(needy, 30)
    draft.extend(needy, 96)
    high.run(draft)
    hosted = made.service.server.plane.pools["default"].sessions[low.session_id]
    wait_until(lambda: bool(hosted.revocations), "the notice is out")
    bad = low.draft()
    bad.finish(victim + (9 << 32))
    low.submit(bad)
    with pytest.raises(InvalidArgumentError):
        low.collect()
    made.restart()
    result = low.run(low.draft())
    assert [each.sequence_id for each in result.revocations] == [victim], "it did yield"
    for _ in range(2):  # the first one after the result would acknowledge it
        low.run(low.draft())
    high.run(high.draft())


def test_a_deadline_holds_while_the_heartbeat_resumes(
    world: Callable[..., World], open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service takes its time to open the session again; `collect` does not wait longer than it was told."""
    made = world()
    session = open_session(address=made.service.address, ttl_seconds=4.0)
    entered, left = threading.Event(), threading.Event()
    opened, aio_opened = GrpcCacheControl.open_session, AioCacheControl.open_session

    def open_sync(self: Any, request: Any) -> Any:
        entered.set()
        time.sleep(0.8)
        left.set()
        return opened(self, request)

    async def open_aio(self: Any, request: Any) -> Any:
        entered.set()
        await asyncio.sleep(0.8)
        left.set()
        return await aio_opened(self, request)

    made.die()
    session.submit(session.draft())
    monkeypatch.setattr(GrpcCacheControl, "open_session", open_sync)
    monkeypatch.setattr(AioCacheControl, "open_session", open_aio)
    made.start()
    assert entered.wait(10)
    with pytest.raises(DeadlineExceededError):
        session.collect(0.1)
    assert not left.is_set()
    assert session.collect().step_id
