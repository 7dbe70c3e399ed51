"""Sequences that yield to other sessions: told, acknowledged when drained, and in which order."""

import time
from typing import Any

import numpy as np
import pytest

from client_rig import OpenSession, Running, admit, write_all
from kvplane.client import (
    SequenceState,
    StateReason,
)
from kvplane.client.sequences import row_of
from kvplane.wire import errors
from service_rig import wait_until


def need_blocks(session: Any, sequence_id: int, committed: int | None = None) -> Any:
    """Ask for six blocks for a sequence, more than a small pool has left."""
    draft = session.draft()
    if committed is not None:
        draft.commit(sequence_id, committed)
    draft.extend(sequence_id, 96)
    return session.run(draft)


@pytest.mark.parametrize("running", [8], indirect=True)
def test_a_revocation_is_told_and_acknowledged_when_drained(running: Running, open_session: OpenSession) -> None:
    """Another session's need takes a sequence: the result says so, its blocks stay until its device work has
    completed, then the other one gets them."""
    low, high = (open_session(address=running.address) for _ in range(2))
    victim, _ = admit(low, np.arange(64), priority=5)
    needy, result = admit(high, np.arange(1000, 1030))
    assert result.admitted
    result = need_blocks(high, needy, committed=30)
    assert result.changes[0].reason == StateReason.BLOCKS_COMING
    hosted = running.service.server.plane.pools["default"].sessions[low.session_id]
    wait_until(lambda: bool(hosted.revocations), "the notice is out")
    result = low.run(low.draft())
    while not result.revocations:
        result = low.run(low.draft())
    assert [each.sequence_id for each in result.revocations] == [victim]
    assert low.sequences.state[row_of(victim)] == SequenceState.PREEMPTED
    assert high.run(high.draft()).pool.quarantined_blocks == 4
    low.complete(low.state.last_step)
    low.run(low.draft())
    need_blocks(high, needy)
    assert high.sequences.num_blocks[row_of(needy)] == 6


@pytest.mark.parametrize("running", [8], indirect=True)
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_revocation_takes_what_was_granted_before_it(running: Running, open_session: OpenSession, ahead: int) -> None:
    """A notice that came behind one or two answers takes the blocks of both, is told with the answer that it came
    behind, and is acknowledged by no step that was made without knowing it."""
    low, high = (open_session(address=running.address) for _ in range(2))
    low.state.track_plans()
    victim, _ = admit(low, np.arange(48), priority=5)
    needy, _ = admit(high, np.arange(1000, 1030))
    draft = low.draft()
    draft.commit(victim, 48)
    low.submit(draft)
    if ahead == 2:
        draft = low.draft()
        draft.extend(victim, 64)
        low.submit(draft)
    ledger = running.core.state.sessions[low.session_id].ledger
    wait_until(lambda: ledger.newest_step == low.state.last_sent_step, "the steps are applied")
    need_blocks(high, needy, committed=30)
    time.sleep(0.2)  # the notice is with the client
    results = [low.collect() for _ in range(ahead)]
    row = row_of(victim)
    assert [[each.sequence_id for each in result.revocations] for result in results] == [[]] * (ahead - 1) + [[victim]]
    assert (low.sequences.state[row], low.sequences.num_blocks[row]) == (SequenceState.PREEMPTED, 0)
    changes = low.state.take_changes()
    held = np.bincount(changes.granted_ids, minlength=8)
    for _, ids in changes.released:
        np.subtract.at(held, ids, 1)
    assert not held.any()
    low.run(low.draft())
    need_blocks(high, needy)
    assert high.sequences.num_blocks[row_of(needy)] == 6


@pytest.mark.parametrize("running", [8], indirect=True)
def test_what_a_refusal_hides_is_not_acknowledged(running: Running, open_session: OpenSession) -> None:
    """A revocation that came before the answer of a refused step is told with the next result. Steps that are made
    meanwhile may name its sequence: what they say is skipped, not refused."""
    low, high = (open_session(address=running.address) for _ in range(2))
    low.state.track_plans()
    victim, _ = admit(low, np.arange(64), priority=5)
    needy, _ = admit(high, np.arange(1000, 1030))
    need_blocks(high, needy, committed=30)
    bad = low.draft()
    bad.extend(victim + (9 << 32), 80)
    low.submit(bad)
    with pytest.raises(errors.InvalidArgumentError):
        low.collect()
    for _ in range(2):
        draft = low.draft()
        draft.extend(victim, 80)
        low.submit(draft)
    first, second = low.collect(), low.collect()
    assert [each.sequence_id for each in first.revocations] == [victim]
    assert [each.sequence_id for each in (*first.skipped, *second.skipped)] == [victim] * 2


@pytest.mark.parametrize("running", [8], indirect=True)
def test_what_is_revoked_before_its_admission_is_read_never_ran(running: Running, open_session: OpenSession) -> None:
    """An admission and the revocation behind it are collected at once: the engine is told of the end alone, and what
    it sends next is right."""
    low, high = (open_session(address=running.address) for _ in range(2))
    needy, _ = admit(high, np.arange(1000, 1030))
    write_all(high, needy, 30)
    draft = low.draft()
    victim = draft.admit(np.arange(64), priority=5)
    low.submit(draft)
    wait_until(lambda: running.core.state.running == 2, "the victim runs")
    need_blocks(high, needy)
    wait_until(lambda: running.core.state.running == 1, "it had to yield")
    time.sleep(0.2)
    result = low.collect()
    if not result.revocations:  # the notice was slower
        result = low.run(low.draft())
    assert [each.sequence_id for each in result.revocations] == [victim]
    assert victim not in [each.sequence_id for each in result.admitted]
    assert low.sequences.state[row_of(victim)] == SequenceState.PREEMPTED
    low.complete(low.state.last_step)
    draft = low.draft()
    draft.readmit(victim)
    low.run(draft)
