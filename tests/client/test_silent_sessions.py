"""Engines that send no steps while the cache service is restarted: the heartbeat resumes their sessions."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from client_rig import PROMPT, OpenSession, core_of, launch
from kvplane.client import LaunchPausedError
from kvplane.client.aio_control import AioCacheControl
from kvplane.client.control import GrpcCacheControl
from kvplane.client.sequences import row_of
from kvplane.wire.errors import UnavailableError
from recovery.conftest import World
from service_rig import wait_until
from session_walk import same_as_service


def test_silent_sessions_keep_their_sequences(world: Callable[..., World], open_session: OpenSession) -> None:
    """Engines hold sequences, or none, and send no steps for longer than their time to live after two restarts: their
    heartbeats say what they hold. What of it was cut, the next result tells; no plan is made before that."""
    made = world()
    holders = [
        open_session(address=made.service.address, mode=mode, ttl_seconds=2.0) for mode in ("attached", "remote")
    ]
    idle = open_session(address=made.service.address, ttl_seconds=2.0)
    held = [two_sequences(session, made, 2000 * index) for index, session in enumerate(holders)]
    tables = [session.sequences.blocks.copy() for session in holders]
    for restarts in (1, 2):
        begin = time.monotonic()
        made.restart()
        for session in (*holders, idle):
            wait_for_lease(session, restarts + 1)
        wait_until(lambda: made.state() == "READY", "the pool is open")
    time.sleep(max(0.0, begin + 2.3 - time.monotonic()))
    for session, (whole, cut), before in zip(holders, held, tables, strict=True):
        with pytest.raises(LaunchPausedError):
            session.state.check_declared()
        assert (session.sequences.blocks == before).all(), "the tables change with a result only"
        draft = session.draft()
        draft.advance([whole, cut], [7, 7], [40, 40], [42, 80])
        session.submit(draft)  # as if more were launched before its answer
        result = session.collect()
        session.state.check_declared()
        assert [(each.sequence_id, each.num_slots, each.reason) for each in result.cuts] == [(cut, 48, "NEVER_WRITTEN")]
        row = row_of(whole)
        assert session.sequences.blocks[row, :3].tolist() == before[row, :3].tolist()
        assert session.sequences.known[row] == 41
    draft = idle.draft()
    draft.admit(PROMPT)
    assert idle.run(draft).admitted
    for session in (*holders, idle):
        agrees(session, made)


def wait_for_lease(session: Any, lease_epoch: int) -> None:
    """The heartbeat has resumed the session so often."""
    wait_until(lambda: session.state.lease_epoch == lease_epoch, "the session is resumed")


def wait_until_applied(session: Any, world: World) -> None:
    """The service has applied all steps, and nobody has collected the last one."""
    ledger, newest = core_of(world).state.sessions[session.session_id].ledger, session.state.last_sent_step
    wait_until(lambda: ledger.newest_step == newest, "it is applied")


def agrees(session: Any, world: World) -> None:
    """Both sides hold the same."""
    world.service.on_loop(lambda: same_as_service(session, core_of(world)))


def two_sequences(session: Any, world: World, first_token: int) -> tuple[int, int]:
    """Two sequences that are written; the second one has two more blocks that nobody writes."""
    session.state.track_plans()
    draft = session.draft()
    whole, cut = draft.admit(PROMPT + first_token), draft.admit(PROMPT + first_token + 1000)
    session.run(draft)
    launch(session, world)
    draft = session.draft()
    draft.commit([whole, cut], [40, 40])
    draft.extend(cut, 80)
    session.run(draft)
    session.flush()
    return whole, cut


def running(session: Any, world: World) -> int:
    """A sequence that is written."""
    draft = session.draft()
    sequence_id: int = draft.admit(PROMPT)
    session.run(draft)
    launch(session, world)
    draft = session.draft()
    draft.commit(sequence_id, 40)
    session.run(draft)
    session.flush()
    return sequence_id


def test_a_stream_that_breaks_while_the_heartbeat_declares(
    world: Callable[..., World], open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has its new lease, and the service does not know yet what it holds: the heartbeat goes on trying."""
    made = world()
    session = open_session(address=made.service.address, ttl_seconds=2.0)
    sequence_id = running(session, made)
    left = [2]

    def breaks() -> None:
        if session.state.lease_epoch == 2 and left[0]:
            left[0] -= 1
            raise UnavailableError("the connection is cut")

    step, aio_step = GrpcCacheControl.step, AioCacheControl.step

    def step_sync(self: Any, opening: Any) -> Any:
        breaks()
        return step(self, opening)

    async def step_aio(self: Any, opening: Any) -> Any:
        breaks()
        return await aio_step(self, opening)

    monkeypatch.setattr(GrpcCacheControl, "step", step_sync)
    monkeypatch.setattr(AioCacheControl, "step", step_aio)
    made.restart()
    wait_until(lambda: made.state() == "READY", "the pool is open")
    time.sleep(2.3)
    assert left == [0]
    draft = session.draft()
    draft.advance(sequence_id, 7, 40, 42)
    session.run(draft)
    assert session.sequences.known[row_of(sequence_id)] == 41


def test_steps_on_their_way(world: Callable[..., World], open_session: OpenSession) -> None:
    """Engines do not collect a step for longer than their time to live: it is applied once all the same, whether the
    service that died had applied it or never had it."""
    made = world()
    sessions = [open_session(address=made.service.address, ttl_seconds=2.0) for _ in range(2)]
    ids = [running(session, made) for session in sessions]
    for session, sequence_id, dies in zip(sessions, ids, (False, True), strict=True):
        draft = session.draft()
        draft.advance(sequence_id, 7, 40, 48)
        if dies:
            made.die()
            session.submit(draft)
        else:
            session.submit(draft)
            wait_until_applied(session, made)
    made.start()
    wait_until(lambda: made.state() == "READY", "the pool is open")
    time.sleep(2.3)
    for session, sequence_id in zip(sessions, ids, strict=True):
        session.collect()
        draft = session.draft()
        draft.advance(sequence_id, 8, 40, 48)
        session.run(draft)
        table, row = session.sequences, row_of(sequence_id)
        assert table.known[row] == 42
        assert table.tokens[row, 40:42].tolist() == [7, 8]
        agrees(session, made)
