"""Who is waited for, for how long, and what of a silent engine is given to others."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplane.cache.service.clock import RunningClock
from kvplane.cache.service.keys import Keys, Lease
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire import errors
from recovery.conftest import MakeWorld
from recovery.test_declarations import running
from recovery_engine import RecoveringEngine
from service_rig import RunningService, wait_until
from tensorless_shard import TensorlessShard
from wire_engine import A, B, WireEngine, admit, new_sequence

ATTACHED, REMOTE = types_pb2.SESSION_MODE_ATTACHED, types_pb2.SESSION_MODE_REMOTE


def test_a_silent_remote_engine_is_waited_for_and_fenced(world: MakeWorld) -> None:
    """Nobody gets its blocks before its time to live is over; then it is fenced on all shards and forgotten."""
    here = world(num_shards=2)
    silent, there = running(here, REMOTE, ttl_ms=2000), running(here, ATTACHED, first=500)
    here.restart()
    begin = time.monotonic()
    there.come_back(here.service.control())
    there.step(admit=admit(new_sequence(B, list(range(900, 940)))))
    assert there.states()[B] == ("WAITING", "POOL_NOT_READY")
    with pytest.raises(errors.UnavailableError) as refused:
        WireEngine(here.service.control())
    assert refused.value.reason == "RECONCILING"
    assert refused.value.retry_after_seconds
    assert here.state() == "RECONCILING"
    here.service.wait_ready()
    assert 1.9 < time.monotonic() - begin < 4
    for shard in here.shards:
        assert silent.session_id in shard.fenced
        wait_until(lambda shard=shard: silent.session_id not in shard.sessions, "it is forgotten")  # type: ignore[misc]
    stats = here.stats()
    assert (stats.held_blocks, stats.quarantined_blocks, stats.cached_blocks) == (3, 0, 2)
    there.step(admit=admit(again=[B]))
    assert there.states() == {}
    with pytest.raises(errors.SessionExpiredError):
        silent.resume(here.service.control())


def test_of_a_silent_attached_engine_the_hold_map_is_kept(world: MakeWorld) -> None:
    """Exactly those blocks stay deferred, until its last process is gone."""
    here = world(num_shards=2)
    silent = running(here, ATTACHED, ttl_ms=2000)
    for rank, shard in enumerate(here.shards):
        shard.attached(silent.session_id, 100 + rank)
        # It may touch its unsealed block, its second block, and one that it was given in an answer that was lost.
        held = [silent.held[A].table[1][0], silent.held[A].table[2][0], 40]
        shard.hold_maps[silent.session_id, 100 + rank] |= set(held[rank:])
    time.sleep(0.2)
    here.restart()
    here.service.wait_ready()
    stats = here.stats()
    # The second block keeps its parent, the first.
    assert (stats.held_blocks, stats.quarantined_blocks, stats.cached_blocks) == (0, 4, 0)
    here.service.check_integrity()
    here.shards[0].process_gone(silent.session_id, 100)
    time.sleep(0.3)
    assert here.stats().quarantined_blocks == 4, "gone means gone from every shard"
    here.shards[1].process_gone(silent.session_id, 101)
    wait_until(lambda: here.stats().quarantined_blocks == 0, "its blocks are back")
    assert here.stats().cached_blocks == 2


def test_an_engine_that_is_gone_is_not_waited_for(world: MakeWorld) -> None:
    """Its processes ended while the service was away: the shard says so when it is back."""
    here = world()
    engine = running(here, ATTACHED, ttl_ms=60_000)
    here.shards[0].attached(engine.session_id, 100)
    time.sleep(0.2)
    here.die()
    here.shards[0].sessions[engine.session_id].processes.add(pid=101, start_ticks=1)
    here.shards[0].process_gone(engine.session_id, 101)
    here.shards[0].process_gone(engine.session_id, 100)
    here.start()
    here.service.wait_ready()
    assert here.stats().quarantined_blocks == 0
    assert here.stats().cached_blocks == 2


def test_a_fenced_session_does_not_come_back(world: MakeWorld) -> None:
    """What the last start of the service fenced, the next one does not let in."""
    here = world()
    engine = running(here, REMOTE, ttl_ms=60_000)
    here.die()
    here.shards[0].sessions[engine.session_id].fenced = True
    here.start()
    with pytest.raises(errors.SessionExpiredError):
        engine.resume(here.service.control())
    here.service.wait_ready()


def test_a_heartbeat_is_no_declaration(world: MakeWorld) -> None:
    """An engine that only says that it is alive does not keep the pool closed."""
    here = world()
    engine = running(here, ttl_ms=2000)
    here.restart()
    opened = engine.resume(here.service.control())
    beat = cache_pb2.HeartbeatRequest(session_id=opened.session_id, lease_epoch=opened.lease_epoch)

    def ready() -> bool:
        if here.state() == "RECONCILING":
            with suppress(errors.SessionExpiredError):
                engine.control.heartbeat(beat)
        return here.state() == "READY"

    wait_until(ready, "the pool opens", 5)
    with pytest.raises(errors.SessionExpiredError):
        engine.control.heartbeat(beat)


def test_closing_ends_the_waiting(world: MakeWorld) -> None:
    """An engine that leaves while the pool is reconciling is not waited for."""
    here = world()
    engine = running(here, ttl_ms=60_000)
    here.restart()
    control = here.service.control()
    wait_until(lambda: here.stats().cached_blocks == 2, "the inventory is read")
    control.close_session(
        cache_pb2.CloseSessionRequest(session_id=engine.session_id, lease_epoch=engine.opened.lease_epoch, drained=True)
    )
    here.service.wait_ready()
    assert here.stats().free_blocks == 61


def test_a_stream_of_the_old_start_is_told_to_resume(world: MakeWorld) -> None:
    """The old epochs are refused, with what to do."""
    here = world()
    engine = running(here)
    here.restart()
    wait_until(lambda: here.stats().cached_blocks == 2, "the inventory is read")
    engine.control = here.service.control()
    stream = engine.control.step(engine.opening())
    with pytest.raises(errors.StaleEpochError, match="token"):
        stream.receive()
    engine.come_back(here.service.control())


def test_a_second_control_plane_takes_over(tmp_path: Path) -> None:
    """The shard follows the newer one; the older one loses its stream, allocates nothing, and cannot come back."""
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    key = tmp_path / "key"
    options: dict[str, Any] = {"watermark": 0.0, "drain_seconds": 0.0, "metrics_address": "", "key_file": key}
    old = RunningService(folders[0], **options)
    shard = TensorlessShard(old.address).start()
    old.wait_ready()
    engine = RecoveringEngine(old.control(), [shard])
    engine.step(admit=admit(new_sequence(A, list(range(40)))))
    new = RunningService(folders[1], **options)
    shard.follow(new.address)
    assert shard.incarnation == 2
    wait_until(lambda: not old.server.plane.ready, "the old one is closed")
    with pytest.raises(errors.StaleEpochError):
        engine.step()
    beat = cache_pb2.HeartbeatRequest(session_id=engine.session_id, lease_epoch=engine.opened.lease_epoch)
    with pytest.raises(errors.SessionExpiredError):
        old.control().heartbeat(beat)
    with pytest.raises(errors.UnavailableError):
        old.control().open_session(
            cache_pb2.OpenSessionRequest(pool_id="default", resume_token=engine.opened.resume_token)
        )
    engine.come_back(new.control())
    new.wait_ready()
    assert engine.cuts == {}
    engine.step(admit=admit(new_sequence(B, list(range(500, 540)))))
    assert len(engine.held[B].table) == 3
    for service in (old, new):
        service.check_integrity()
    # And back: what the older one knew counts for nothing, it reads and waits like any that was restarted.
    shard.follow(old.address)
    assert shard.incarnation == 3
    del engine.held[B]
    engine.come_back(old.control())
    old.wait_ready()
    assert engine.cuts == {}
    old.check_integrity()
    shard.stop()
    for service in (old, new):
        service.stop()


def test_a_process_that_attaches_late_is_known(world: MakeWorld) -> None:
    """It maps the pool while its engine has not come back: its hold map counts as well."""
    here = world()
    silent = running(here, ATTACHED, ttl_ms=2000)
    here.restart()
    wait_until(lambda: here.stats().cached_blocks == 2, "the inventory is read")
    here.shards[0].attached(silent.session_id, 100)
    here.shards[0].hold_maps[silent.session_id, 100] |= {50}
    here.service.wait_ready()
    assert here.stats().quarantined_blocks == 1
    here.shards[0].process_gone(silent.session_id, 100)
    wait_until(lambda: here.stats().quarantined_blocks == 0, "its block is back")


def test_what_is_stamped_meanwhile_is_not_hit(world: MakeWorld) -> None:
    """A late engine stamps a block of the old start, sees the new one, and launches nothing: its row is out, and so are
    those behind it."""
    here = world()
    silent = running(here, REMOTE, ttl_ms=2000)
    (first, _), (second, mark), _ = silent.held[A].table
    here.restart()
    wait_until(lambda: here.stats().cached_blocks == 2, "the inventory is read")
    here.shards[0].stamp(np.array([second]), np.array([mark + 1], np.uint64))
    here.service.wait_ready()
    wait_until(lambda: here.shards[0].sealed_blocks() == [first], "the row is void")
    assert here.stats().cached_blocks == 1
    assert here.stats().free_blocks == 62


def test_a_lease_that_ends_while_a_shard_is_away_is_fenced_when_it_is_back(world: MakeWorld) -> None:
    """The stream broke, the lease ran out: the fence waits for the shard, and the blocks wait for the fence."""
    here = world()
    engine = running(here, REMOTE, ttl_ms=2000)
    here.shards[0].cut()
    plane = here.service.server.plane
    session = plane.pools["default"].sessions[engine.session_id]
    wait_until(lambda: session.core.ended, "the lease runs out")
    assert here.stats().quarantined_blocks == 3
    assert engine.session_id not in here.shards[0].fenced
    here.shards[0].start()
    wait_until(lambda: here.stats().quarantined_blocks == 0, "its blocks are back")
    assert engine.session_id in here.shards[0].fenced
    here.service.wait_ready()


def test_the_clock_of_leases_stands_still_with_the_process() -> None:
    """A gap is no time that anybody was silent."""
    moments = iter([10.0, 10.2, 10.9, 15.0, 15.3])
    clock = RunningClock(lambda: next(moments))
    assert [round(clock(), 6) for _ in range(4)] == [10.2, 10.9, 10.9, 11.2]


def test_the_key_file_is_this_users_alone(tmp_path: Path) -> None:
    """Made once with safe permissions; one that others may read is refused."""
    path = tmp_path / "new" / "cache.key"
    first, second = Keys.load(path), Keys.load(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["cache.key"]
    lease = Lease("default", 3, 77, REMOTE, 2000, 1, 64, 0, "tenant", "engine")
    token = first.token(lease)
    assert second.lease(token) == lease
    assert first.session_secret(77) == second.session_secret(77) != first.session_secret(78)
    for at in range(len(token)):
        with pytest.raises(errors.SessionExpiredError):
            second.lease(token[:at] + bytes([token[at] ^ 1]) + token[at + 1 :])
    path.chmod(0o640)
    with pytest.raises(RuntimeError, match="key_file"):
        Keys.load(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(RuntimeError, match="key_file"):
        Keys.load(path)
