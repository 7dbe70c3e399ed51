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


@pytest.mark.parametrize(("mode", "restarts"), [("attached", 1), ("remote", 1), ("attached", 2)])
def test_a_silent_session_keeps_its_sequences(
    world: Callable[..., World], open_session: OpenSession, mode: str, restarts: int
) -> None:
    """An engine holds a sequence and sends no steps for longer than its time to live after a restart, or two: its
    heartbeat says what it holds. What of it was cut, the next result tells; no plan is made before that."""
    made = world()
    session = open_session(address=made.service.address, mode=mode, ttl_seconds=2.0)
    session.state.track_plans()
    draft = session.draft()
    whole, cut = draft.admit(PROMPT), draft.admit(PROMPT + 1000)
    session.run(draft)
    launch(session, made)
    draft = session.draft()
    draft.commit([whole, cut], [40, 40])
    draft.extend(cut, 80)  # two blocks that nobody writes
    session.run(draft)
    session.flush()
    table, row = session.sequences, row_of(whole)
    blocks = table.blocks[row, :3].copy()
    begin = time.monotonic()
    for round_ in range(restarts):
        made.restart()
        wait_until(lambda: session.state.lease_epoch == round_ + 2, "the heartbeat has resumed the session")  # noqa: B023
        wait_until(lambda: made.state() == "READY", "the pool is open")
    time.sleep(max(0.0, begin + 2.3 - time.monotonic()))
    with pytest.raises(LaunchPausedError):
        session.state.check_declared()
    assert table.num_blocks[row_of(cut)] == 5, "the tables change with a result only"
    draft = session.draft()
    draft.advance([whole, cut], [7, 7], [40, 40], [42, 80])
    session.submit(draft)  # as if more were launched before its answer
    result = session.collect()
    session.state.check_declared()
    assert [(each.sequence_id, each.num_slots, each.reason) for each in result.cuts] == [(cut, 48, "NEVER_WRITTEN")]
    assert table.blocks[row, :3].tolist() == blocks.tolist()
    assert table.known[row] == 41
    made.service.on_loop(lambda: same_as_service(session, core_of(made)))


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


@pytest.mark.parametrize("answered", [False, True])
def test_a_step_on_its_way(world: Callable[..., World], open_session: OpenSession, answered: bool) -> None:
    """Its engine does not collect it for longer than the time to live: it is applied once all the same, whether the
    service that died had applied it or never had it."""
    made = world()
    session = open_session(address=made.service.address, ttl_seconds=2.0)
    sequence_id = running(session, made)
    draft = session.draft()
    draft.advance(sequence_id, 7, 40, 48)
    if answered:
        session.submit(draft)
        core = core_of(made)
        newest = session.state.last_sent_step
        wait_until(lambda: core.state.sessions[session.session_id].ledger.newest_step == newest, "it is applied")
        made.restart()
    else:
        made.die()
        session.submit(draft)
        made.start()
    wait_until(lambda: made.state() == "READY", "the pool is open")
    time.sleep(2.3)
    session.collect()
    draft = session.draft()
    draft.advance(sequence_id, 8, 40, 48)
    session.run(draft)
    table, row = session.sequences, row_of(sequence_id)
    assert table.known[row] == 42
    assert table.tokens[row, 40:42].tolist() == [7, 8]
    made.service.on_loop(lambda: same_as_service(session, core_of(made)))
