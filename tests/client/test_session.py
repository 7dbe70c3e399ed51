"""Sessions of the SDK, sync and asyncio, on a real service: what they say of it is what it holds."""

import os
import time
from typing import Any

import numpy as np
import pytest

from client_rig import PROMPT, OpenSession, Running, admit, write_all
from cut_proxy import CutProxy
from kvplane.client import (
    ForkedProcessError,
    HitReason,
    LaunchPausedError,
    SequenceState,
    Session,
    SessionClosedError,
    StateReason,
)
from kvplane.client.sequences import row_of
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire import errors
from session_walk import Walk, same_as_service


def test_a_prompt_hits_after_the_flush_and_the_reason_is_told(running: Running, open_session: OpenSession) -> None:
    """The README's story without tensors: admit, commit, flush, admit again."""
    session = open_session(address=running.address)
    first, result = admit(session, PROMPT)
    (admission,) = result.admitted
    assert (admission.cached_tokens, admission.num_slots, admission.hit_reason) == (0, 40, HitReason.NEVER_SEEN)
    table = session.sequences
    assert table.num_blocks[row_of(first)] == 3
    assert (table.blocks[row_of(first), :3] > 0).all()
    second, result = admit(session, PROMPT)
    assert [(change.sequence_id, change.state, change.reason) for change in result.changes] == [
        (second, SequenceState.WAITING, StateReason.PREFIX_PENDING)
    ]
    write_all(session, first, 40)
    session.flush()
    assert session.lookup(PROMPT).tokens == 32
    draft = session.draft()
    draft.readmit(second)
    (admission,) = session.run(draft).admitted
    assert (admission.cached_tokens, admission.hit_reason) == (32, HitReason.FULL)
    shared = table.blocks[[row_of(first), row_of(second)], :2]
    assert shared[0].tolist() == shared[1].tolist()


@pytest.mark.parametrize("running", [24], indirect=True)
@pytest.mark.parametrize("mode", ["attached", "remote"])
@pytest.mark.parametrize("seed", range(3))
def test_columns_are_what_the_service_holds(running: Running, open_session: OpenSession, mode: str, seed: int) -> None:
    """Random steps, several on their way at once, in a pool that is too small: tables, tokens, lengths and states agree
    with the service's own after every batch, and nothing is left at the end."""
    session = open_session(address=running.address, mode=mode, max_sequences=16)
    walk = Walk(session, seed)
    for _ in range(8):
        walk.steps(10)
        running.service.on_loop(lambda: same_as_service(session, running.core))
    assert walk.seen["preempted"] > 0
    assert walk.seen["hit"] > 0
    assert walk.seen["forked"] > 0
    walk.finish_all()
    session.flush()
    stats = session.run(session.draft()).pool
    assert stats.held_blocks == stats.quarantined_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == 23


@pytest.mark.parametrize("seed", range(2))
def test_cut_connections_lose_and_repeat_nothing(running: Running, open_session: OpenSession, seed: int) -> None:
    """I7: the stream breaks at random moments while steps are on their way; each is applied exactly once."""
    proxy = CutProxy(running.address)
    try:
        session = open_session(address=proxy.address, max_sequences=16)
        walk = Walk(session, seed)
        for round_ in range(12):
            draft = walk.session.draft()
            sequence_id = draft.admit([round_, 1, 2])
            session.submit(draft)
            if round_ % 3 == 0:
                proxy.hold()
                proxy.cut()
                proxy.release()
            walk.waiting.append(sequence_id)
            walk.note(session.collect())
            walk.steps(6)
            if round_ % 3 == 1:
                proxy.cut()
        running.service.on_loop(lambda: same_as_service(session, running.core))
        assert proxy.connections > 4
        assert running.core.state.sessions[session.session_id].ledger.newest_step == session.state.last_step
    finally:
        proxy.close()


def test_a_rejected_step_names_the_field_and_changes_nothing(running: Running, open_session: OpenSession) -> None:
    """The error is typed and raised by `collect`; the step behind is rejected too; rows come back."""
    session = open_session(address=running.address, max_sequences=2)
    first, _ = admit(session, PROMPT)
    bad, behind = session.draft(), session.draft()
    bad.commit(first, 41)
    bad.admit(PROMPT)
    session.submit(bad)
    behind.extend(first, 64)
    session.submit(behind)
    with pytest.raises(errors.InvalidArgumentError) as refused:
        session.collect()
    assert refused.value.violations[0].field == "step.commit.num_tokens[0]"
    with pytest.raises(errors.PriorStepRejectedError):
        session.collect()
    admit(session, PROMPT)  # the row of the rejected step is free again
    running.service.on_loop(lambda: same_as_service(session, running.core))
    with pytest.raises(errors.LimitExceededError) as full:
        session.draft().admit(PROMPT)
    assert full.value.metadata["limit"] == "max_sequences"


def test_drafts_refuse_what_fits_no_step(running: Running, open_session: OpenSession) -> None:
    """Wrong types, lengths, signs and empty prompts are refused by name before anything is sent."""
    session = open_session(address=running.address)
    draft = session.draft()
    for call, field in (
        (lambda: draft.commit([1, 2], [3]), "commit.lengths"),
        (lambda: draft.extend(1, -1), "extend.lengths"),
        (lambda: draft.advance([1], [2], [3], [4, 5]), "advance.num_slots"),
        (lambda: draft.admit([]), "tokens"),
        (lambda: draft.admit([1.5]), "tokens"),
        (lambda: draft.admit([1], max_chunk_tokens=0), "max_chunk_tokens"),
    ):
        with pytest.raises(errors.InvalidArgumentError) as refused:
            call()
        assert refused.value.violations[0].field == field
    draft = session.draft()
    draft.admit([1, 2, 3])
    session.run(draft)
    with pytest.raises(errors.PreconditionError):
        session.run(draft)
    assert session.state.last_step == 1


def test_a_refused_operation_leaves_the_draft_and_its_rows(running: Running, open_session: OpenSession) -> None:
    """What a draft refuses is not in it, and takes no row."""
    session = open_session(address=running.address, max_sequences=3)
    parent, _ = admit(session, PROMPT)
    write_all(session, parent, 40)
    draft = session.draft()
    with pytest.raises(errors.LimitExceededError):
        draft.fork(parent, 3)
    with pytest.raises(errors.InvalidArgumentError):
        draft.admit(PROMPT, max_chunk_tokens=0)
    with pytest.raises(errors.InvalidArgumentError):
        draft.readmit([parent], max_chunk_tokens=0)
    with pytest.raises(errors.InvalidArgumentError):
        draft.admit(np.zeros((2, 3), np.uint32))
    assert (draft.new, draft.order, draft.forked) == ([], [], [])
    assert len(draft.fork(parent, 2)) == 2
    assert len(session.run(draft).changes) == 2


def test_at_most_four_steps_are_on_their_way(running: Running, open_session: OpenSession) -> None:
    """A fifth is refused before it is sent; nothing waits for a result that was not asked for."""
    session = open_session(address=running.address)
    for _ in range(4):
        session.submit(session.draft())
    with pytest.raises(errors.LimitExceededError) as full:
        session.submit(session.draft())
    assert full.value.metadata["limit"] == "unanswered_steps"
    assert [session.collect().step_id for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(errors.PreconditionError):
        session.collect()


def test_the_lease_is_renewed_while_no_step_is_sent(running: Running, open_session: OpenSession) -> None:
    """Heartbeats keep a quiet session alive for longer than its time to live."""
    session = open_session(address=running.address, ttl_seconds=2.0)
    time.sleep(3.0)
    session.state.lease.check()
    session.run(session.draft())


def test_launches_pause_when_the_service_is_silent(running: Running, open_session: OpenSession) -> None:
    """After ttl/2 without a renewal nothing may be launched, and the error says when to try again; a deadline passes
    meanwhile, and its step is collected later."""
    proxy = CutProxy(running.address)
    try:
        session = open_session(address=proxy.address, ttl_seconds=2.0)
        session.state.lease.check()
        proxy.hold()
        session.submit(session.draft())
        with pytest.raises(errors.DeadlineExceededError):
            session.collect(timeout=0.1)
        time.sleep(1.1)
        with pytest.raises(LaunchPausedError) as paused:
            session.state.lease.check()
        assert paused.value.retry_after_seconds is not None
        proxy.release()
        assert session.collect().step_id == 1
        session.run(session.draft())
        session.state.lease.check()
    finally:
        proxy.close()


def test_an_expired_lease_is_a_typed_error(running: Running, open_session: OpenSession) -> None:
    """What the service ended, the next step says."""
    session = open_session(address=running.address)
    plane = running.service.server.plane
    running.service.on_loop(
        lambda: plane.close_session(
            cache_pb2.CloseSessionRequest(
                session_id=session.session_id, lease_epoch=session.state.lease_epoch, drained=True
            )
        )
    )
    with pytest.raises(errors.SessionExpiredError):
        session.run(session.draft())


def test_a_pool_is_asked_for_its_model_and_a_wrong_one_is_refused(running: Running, open_session: OpenSession) -> None:
    """An engine that says what it computes is refused by a pool of another model, by name."""
    wrong = types_pb2.ModelIdentity()
    wrong.CopyFrom(open_session(address=running.address).pool.model)
    wrong.weights_revision = "other"
    with pytest.raises(errors.IdentityMismatchError):
        open_session(address=running.address, model=wrong)
    with pytest.raises(errors.InvalidArgumentError):
        open_session(address=running.address, mode="attach")
    with pytest.raises(errors.NotFoundError):
        open_session(pool_id="nowhere", address=running.address)


def test_namespaces_share_nothing(running: Running, open_session: OpenSession) -> None:
    """A prompt of one namespace is no hit in another."""
    session = open_session(address=running.address)
    other = session.register_namespace(adapter_id="lora", adapter_revision="1")
    first, _ = admit(session, PROMPT)
    write_all(session, first, 40)
    session.flush()
    assert session.lookup(PROMPT).tokens == 32
    assert session.lookup(PROMPT, namespace_id=other).tokens == 0


def test_a_closed_session_is_refused_and_leaves_nothing(running: Running, open_session: OpenSession) -> None:
    """Closing lets go of what it held; using it afterwards is a typed error; closing twice is allowed."""
    session = open_session(address=running.address)
    admit(session, PROMPT)
    session.complete(session.state.last_step)
    session.close()
    session.close()
    with pytest.raises(SessionClosedError):
        session.draft()
    assert running.core.state.statistics().held == 0
    assert running.core.state.statistics().quarantined == 0


def test_a_forked_child_is_refused(running: Running) -> None:
    """Connections do not survive a fork, and two processes must not share a lease."""
    with Session.open(address=running.address) as session:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                session.run(session.draft())
            except ForkedProcessError:
                os.write(write, b"refused")
            finally:
                os._exit(0)
        os.close(write)
        assert os.read(read, 16) == b"refused"
        os.waitpid(child, 0)
        os.close(read)
        session.run(session.draft())


def test_nobody_listens(tmp_path: Any, open_session: OpenSession) -> None:
    """A service that is not there is an UnavailableError within the time given."""
    started = time.monotonic()
    with pytest.raises(errors.UnavailableError):
        open_session(address=f"unix:{tmp_path}/nobody.sock", timeout=0.5)
    assert time.monotonic() - started < 5
