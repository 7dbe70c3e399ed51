"""What breaks on the way: streams, engines, shards, leases. Over real sockets."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire import errors
from kvplane.wire.grants import verify
from oracle import Oracle
from service_rig import RunningService, wait_until
from tensorless_shard import TensorlessShard
from wire_engine import (
    BLOCK,
    A,
    B,
    WireEngine,
    admit,
    advance,
    commit,
    core_result,
    core_step,
    finish,
    ids,
    new_sequence,
    numbers,
    sequence_id,
    u32,
    u64,
)

MakeService = Callable[..., tuple[RunningService, list[TensorlessShard]]]


def row_of(shard: TensorlessShard) -> Callable[[int], tuple[bytes, int]]:
    """Reads directory rows of a shard."""

    def row(block: int) -> tuple[bytes, int]:
        assert shard.view is not None
        assert block in shard.sealed_blocks()
        return shard.view.blocks["digest"][block].tobytes(), int(shard.view.blocks["generation"][block])

    return row


def test_a_stream_cut_before_its_answer_loses_nothing(service: MakeService) -> None:
    """The step was applied once; its answer comes again on the next stream; sending it again changes nothing."""
    running, (shard,) = service()
    oracle = Oracle(64, BLOCK)
    engine = WireEngine(running.control(), oracle, row_of(shard))
    engine.step(admit=admit(new_sequence(A, range(40))))
    step = engine.request(commit=commit((A, 40)), admit=admit(new_sequence(B, range(100, 120))))
    engine.send(step)
    wait_until(
        lambda: running.server.plane.pools["default"].sessions[engine.session_id].core.ledger.newest_step == 2,
        "step 2 is applied",
    )
    engine.stream.close()
    assert engine.open_stream().last_applied_step == 2
    again = engine.stream.receive()
    engine.send(step)
    assert engine.stream.receive() == again
    oracle.stepped(engine.session_id, core_step(step), core_result(again.result, engine.session_id))
    engine.seen = 2
    engine.settle()
    engine.step(advance=advance(1, (A, 40, 42), (B, 20, 22)))
    engine.step(finish=finish(A, B))
    engine.settle()
    assert engine.result.stats.held_blocks == 0


def test_a_newer_stream_ends_the_older(service: MakeService) -> None:
    """Two processes cannot drive one session."""
    running, _ = service()
    engine = WireEngine(running.control())
    old = engine.stream
    engine.open_stream()
    with pytest.raises(errors.StaleEpochError):
        old.receive()
    engine.step(admit=admit(new_sequence(A, range(40))))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"session_id": 5}, errors.SessionExpiredError),
        ({"lease_epoch": 9}, errors.StaleEpochError),
        ({"stream_epoch": 9}, errors.StaleEpochError),
    ],
)
def test_a_stream_needs_a_live_session(service: MakeService, changes: dict[str, int], kind: type[Exception]) -> None:
    """What is stale is named as stale."""
    running, _ = service()
    engine = WireEngine(running.control())
    stream = engine.control.step(engine.opening(**changes))
    with pytest.raises(kind):
        stream.receive()


def test_a_dead_engines_blocks_are_back_within_a_second_of_its_lease(service: MakeService) -> None:
    """I8: an open stream renews nothing; published prefixes stay hittable throughout; other sessions never notice."""
    running, (shard,) = service()
    dead = WireEngine(running.control(), ttl_ms=2000)
    dead.step(admit=admit(new_sequence(A, range(40))))
    dead.step(commit=commit((A, 40)))
    dead.settle()
    died = time.monotonic()
    alive = WireEngine(running.control())
    alive.step(admit=admit(new_sequence(A, range(40))))
    assert alive.admitted() == {A: (32, "FULL")}
    wait_until(lambda: dead.session_id in shard.fenced, "the shard has fenced the session", 4)
    wait_until(lambda: dead.session_id not in running.server.plane.pools["default"].sessions, "its blocks are back", 4)
    assert time.monotonic() - died < 2.0 + 1.0 + 0.3
    with pytest.raises(errors.SessionExpiredError):
        dead.stream.receive()
    alive.step()
    stats = alive.result.stats
    assert (stats.held_blocks, stats.quarantined_blocks) == (3, 0)


def test_an_engine_seen_dying_gives_its_blocks_back_at_once(service: MakeService) -> None:
    """A shard reports that the only process is gone; no lease has to run out. Events are acted on once."""
    running, (shard,) = service()
    engine = WireEngine(running.control(), ttl_ms=60_000)
    shard.attached(engine.session_id, pid=1234)
    engine.step(admit=admit(new_sequence(A, range(40))))
    session = running.server.plane.pools["default"].sessions[engine.session_id]
    wait_until(lambda: bool(session.processes), "the process is known")
    shard.process_gone(engine.session_id, pid=1234)
    wait_until(lambda: not running.server.plane.pools["default"].sessions, "the session is over")
    pool = running.control().get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool
    assert pool.stats.free_blocks == 63


def test_an_attached_session_stays_quarantined_while_its_process_lives(service: MakeService) -> None:
    """I9: the lease ran out, but a process may still write; its blocks come back when it is gone."""
    running, (shard,) = service()
    engine = WireEngine(running.control(), ttl_ms=2000)
    shard.attached(engine.session_id, pid=77)
    engine.step(admit=admit(new_sequence(A, range(40))))
    wait_until(lambda: engine.session_id in shard.fenced, "the lease is over", 4)
    control = running.control()
    stats = control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool.stats
    assert (stats.quarantined_blocks, stats.free_blocks) == (3, 60)
    shard.process_gone(engine.session_id, pid=77)
    wait_until(
        lambda: control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool.stats.free_blocks == 63,
        "its blocks are back",
    )


def test_nothing_is_published_before_every_shard_has_sealed(service: MakeService) -> None:
    """I3 with two shards, one of them slow."""
    running, (fast, slow) = service(num_shards=2)
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    slow.hold_acks()
    engine.step(commit=commit((A, 40)))
    wait_until(lambda: fast.sealed_blocks() == [1, 2] == slow.sealed_blocks(), "both have written the rows")
    engine.step(admit=admit(new_sequence(B, range(40))))
    assert engine.states()[B] == ("WAITING", "PREFIX_PENDING")
    assert engine.result.published_step < 2
    slow.release_acks()
    engine.settle()
    engine.step(admit=admit(again=[B]))
    assert engine.admitted() == {B: (32, "FULL")}


def test_a_shard_that_is_cut_off_comes_back(service: MakeService) -> None:
    """I11: nothing is allocated meanwhile; commands without an acknowledgement come again and are not done twice."""
    running, shards = service(num_shards=2)
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    shards[1].hold_acks()
    engine.step(commit=commit((A, 40)))
    wait_until(lambda: shards[1].sealed_commands == 1, "the seal arrived")
    shards[1].cut()
    pool = running.server.plane.pools["default"]
    wait_until(lambda: pool.state == types_pb2.POOL_STATE_RECONCILING, "the loss is seen")
    engine.step(admit=admit(new_sequence(B, range(100, 140))))
    assert engine.states()[B] == ("WAITING", "POOL_NOT_READY")
    states = [notice.pool_state.state for notice in engine.notices]
    assert types_pb2.POOL_STATE_RECONCILING in states
    with pytest.raises(errors.UnavailableError) as refused:
        WireEngine(running.control())
    assert refused.value.retry_after_seconds is not None
    shards[1].release_acks()
    shards[1].connect()
    wait_until(lambda: pool.state == types_pb2.POOL_STATE_READY, "it is back")
    engine.settle()
    assert shards[1].sealed_commands == 1
    engine.step(admit=admit(again=[B]))
    assert B in engine.admitted()


def test_a_shard_that_lost_its_memory_ends_the_pools_epoch(service: MakeService) -> None:
    """POOL_LOST for the sessions of the old epoch; the new one is empty and its generations are new."""
    running, (shard,) = service()
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    shard.restart()
    running.wait_ready()
    assert engine.stream.receive().notice.pool_state.state == types_pb2.POOL_STATE_RECONCILING
    assert engine.stream.receive().notice.pool_state.state == types_pb2.POOL_STATE_LOST
    with pytest.raises(errors.PoolLostError):
        engine.stream.receive()
    with pytest.raises(errors.PoolLostError):
        engine.control.heartbeat(cache_pb2.HeartbeatRequest(session_id=engine.session_id, lease_epoch=1))
    fresh = WireEngine(running.control())
    assert fresh.opened.pool.pool_epoch == 2
    fresh.step(admit=admit(new_sequence(A, range(40))))
    assert fresh.admitted() == {A: (0, "NEVER_SEEN")}


def test_shards_that_differ_are_refused(service: MakeService) -> None:
    """Model, layout and place are checked loudly."""
    running, _ = service(num_shards=1)
    for options, kind in [
        ({"block_tokens": 32}, errors.IdentityMismatchError),
        ({"rank": 1, "world_size": 2}, errors.IdentityMismatchError),
        ({}, errors.AlreadyExistsError),
        ({"rank": 3}, errors.InvalidArgumentError),
        ({"num_blocks": 1}, errors.InvalidArgumentError),
    ]:
        other = TensorlessShard(running.address, **options)  # type: ignore[arg-type]
        with pytest.raises(errors.KvplaneError) as refused:
            other.register()
        assert type(refused.value) is kind, options


def test_a_victim_of_another_session_is_told_and_waited_for(service: MakeService) -> None:
    """The revocation comes as a notice; the blocks move on only once it is acknowledged."""
    running, _ = service(num_blocks=12)
    victim, other = WireEngine(running.control()), WireEngine(running.control())
    other.step(admit=admit(new_sequence(A, range(500, 560))))
    victim.step(admit=admit(new_sequence(A, range(90), priority=5)))
    other.step(commit=commit((A, 60)), extend=step_pb2.Extend(sequence_ids=u64([A]), num_slots=b"\x80\0\0\0"))
    assert other.states()[A][0] == "STALLED"
    victim.stream.close()
    victim.open_stream()
    (notice,) = [victim.stream.receive().notice]
    revocation = notice.revocation
    assert [each.sequence_id for each in revocation.preemptions] == [A]
    assert revocation.preemptions[0].candidates == 2
    assert not revocation.preemptions[0].HasField("beneficiary_sequence_id")
    other.step(extend=step_pb2.Extend(sequence_ids=u64([A]), num_slots=b"\x80\0\0\0"))
    assert other.states()[A] == ("STALLED", "BLOCKS_COMING")
    victim.last_seen_notice = notice.notice_id
    victim.step(acknowledged_revocations=u64([revocation.revocation_id]))
    other.step(extend=step_pb2.Extend(sequence_ids=u64([A]), num_slots=b"\x80\0\0\0"))
    assert other.result.table_deltas
    victim.step(admit=admit(again=[A]))


def test_a_thousand_sessions(service: MakeService) -> None:
    """All alive at once, each with a sequence; one more is refused by name; all leave nothing behind."""
    running, _ = service(num_blocks=2048, max_sessions=1000)
    control = running.control()
    engines = [WireEngine(control, max_sequences=1, ttl_ms=120_000) for _ in range(1000)]
    with pytest.raises(errors.LimitExceededError) as refused:
        WireEngine(control, max_sequences=1)
    assert refused.value.metadata == {"limit": "sessions", "value": "1000"}
    for number, engine in enumerate(engines):
        engine.step(admit=admit(new_sequence(sequence_id(0), [number, *range(20)])))
    assert engines[-1].result.stats.held_blocks == 2000
    for engine in engines:
        engine.stream.close()
        control.close_session(cache_pb2.CloseSessionRequest(session_id=engine.session_id, lease_epoch=1, drained=True))
    stats = control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool.stats
    assert (stats.held_blocks, stats.quarantined_blocks) == (0, 0)


def test_remote_sessions_get_signed_grants(service: MakeService) -> None:
    """A remote engine sees no block id: tables travel in grants, numbered, signed, with what shrinks and what goes."""
    running, (shard,) = service()
    engine = WireEngine(running.control(), mode=types_pb2.SESSION_MODE_REMOTE)
    engine.step(admit=admit(new_sequence(A, range(40))))
    pool = running.server.plane.pools["default"]
    assert not engine.result.table_deltas
    body = verify(pool.grant_key, engine.result.grant)
    assert (body.number, body.session_id, body.step_id, body.incarnation) == (1, engine.session_id, 1, pool.incarnation)
    assert body.boot_ids == u64([shard.boot_id])
    assert len(body.table_deltas[0].blocks.block_ids) == 12
    engine.step()
    assert not engine.result.HasField("grant")
    engine.step(
        rollback=step_pb2.Rollback(sequence_ids=u64([A]), num_tokens=b"\x14\0\0\0"),
    )
    body = verify(pool.grant_key, engine.result.grant)
    assert (body.number, body.truncated_sequence_ids, body.truncated_tokens) == (2, u64([A]), b"\x14\0\0\0")
    engine.step(finish=finish(A))
    assert verify(pool.grant_key, engine.result.grant).released_sequence_ids == u64([A])


def test_a_grant_leaves_out_what_the_same_step_took_back(service: MakeService) -> None:
    """A sequence that got a block and yielded it to the next one: a shard releases first, and must not be given entries
    of a table that it has just dropped."""
    running, _ = service(8)
    engine = WireEngine(running.control(), mode=types_pb2.SESSION_MODE_REMOTE)
    engine.step(admit=admit(new_sequence(A, range(48), priority=5), new_sequence(B, range(100, 148))))
    engine.step(commit=commit((A, 48), (B, 48)))
    engine.step(extend=step_pb2.Extend(sequence_ids=u64([A, B]), num_slots=u32([64, 64])))
    assert engine.states()[A][0] == "PREEMPTED"
    body = verify(running.server.plane.pools["default"].grant_key, engine.result.grant)
    assert A in ids(body.released_sequence_ids)
    granted = [sequence for delta in body.table_deltas for sequence in ids(delta.sequence_ids)]
    assert A not in granted
    for delta in body.table_deltas:
        assert len(numbers(delta.blocks.block_ids)) == sum(numbers(delta.counts)) == len(ids(delta.blocks.generations))


def test_draining_is_announced(tmp_path: Any) -> None:
    """Engines are told before the stream ends; new sessions are refused with a time to retry."""
    running = RunningService(tmp_path, drain_seconds=1.0)
    shard = TensorlessShard(running.address).start()
    running.wait_ready()
    engine = WireEngine(running.control())
    running.on_loop(lambda: running.server.plane.drain(1.0))
    assert engine.stream.receive().notice.draining.deadline_ms == 1000
    with pytest.raises(errors.UnavailableError, match="draining"):
        WireEngine(running.control())
    shard.stop()
    running.stop()
