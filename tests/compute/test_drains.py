"""When a shard says that an attached session has drained: processes that say so, and those that nobody can ask."""

import time
from hashlib import sha256

import compute_attached
from compute_control import EngineSession
from compute_harness import Setup
from kvplane.v1 import registry_pb2, types_pb2
from service_rig import wait_until

TTL_SECONDS = 1.0
ATTACHED = types_pb2.SESSION_MODE_ATTACHED


def serve(setup: Setup, session: EngineSession) -> None:
    """Give a session a short time to live."""
    served = registry_pb2.ServedSession(
        session_id=session.session_id,
        lease_epoch=session.lease_epoch,
        tenant_id="tenant",
        ttl_ms=round(1000 * TTL_SECONDS),
        mode=session.mode,
        max_sequences=8,
    )
    secret = sha256(session.secret).digest()
    setup.control.command(serve_session=registry_pb2.ServeSession(session=served, secret_sha256=secret))


def attached(setup: Setup) -> tuple[EngineSession, compute_attached.Attached]:
    """A session with a short time to live, and this process attached to it."""
    session = setup.control.open_session(ATTACHED)
    serve(setup, session)
    return session, compute_attached.attach(setup.address, session.session_id, session.lease_epoch, session.secret)


def told(setup: Setup, session: EngineSession) -> list[int]:
    """Lease epochs up to which the control plane was told that the session has drained."""
    events = [each.session_drained for each in setup.control.all_events if each.HasField("session_drained")]
    return [each.lease_epoch for each in events if each.session_id == session.session_id]


def fence(setup: Setup, session: EngineSession, lease_epoch: int) -> None:
    """End a lease."""
    command = registry_pb2.FenceSession(session_id=session.session_id, lease_epoch=lease_epoch)
    setup.control.command(fence_session=command)


def test_an_empty_hold_map_counts_a_time_to_live_after_the_fence(fresh: Setup) -> None:
    """Before that, a process that has looked at its lease may still launch."""
    session, process = attached(fresh)
    process.close()
    fence(fresh, session, 1)
    time.sleep(0.8 * TTL_SECONDS)
    assert told(fresh, session) == []
    wait_until(lambda: told(fresh, session) == [1], "its map is read", 3.0)


def test_a_hold_map_with_a_bit_does_not_count(fresh: Setup) -> None:
    """It is read again until it is empty."""
    session, process = attached(fresh)
    process.hold_map[1] = 4
    process.connection.close()
    fence(fresh, session, 1)
    time.sleep(TTL_SECONDS + 1.2)
    assert told(fresh, session) == []
    process.hold_map[1] = 0
    wait_until(lambda: told(fresh, session) == [1], "its map is read", 2.0)
    process.close()


def test_a_fence_of_a_lease_that_this_shard_has_not_served(fresh: Setup) -> None:
    """The control plane died while it told the shards of a newer lease: the fence's is what it waits for."""
    session, process = attached(fresh)
    process.close()
    fence(fresh, session, 2)
    wait_until(lambda: told(fresh, session) == [2], "the fence's lease is named", 4.0)


def test_an_empty_map_says_nothing_of_a_newer_lease(fresh: Setup) -> None:
    """The process said nothing itself, and the session is served again: the next fence starts anew."""
    session, process = attached(fresh)
    process.connection.close()
    fence(fresh, session, 1)
    wait_until(lambda: told(fresh, session) == [1], "its map is read", 4.0)
    again = fresh.control.open_session(ATTACHED, resume=session)
    serve(fresh, again)
    process.hold_map[1] = 4
    fence(fresh, again, 2)
    time.sleep(TTL_SECONDS + 1.2)
    assert 2 not in told(fresh, session)
    process.hold_map[1] = 0
    wait_until(lambda: 2 in told(fresh, session), "its map is read again", 2.0)
    process.close()


def test_a_damaged_hold_map_concerns_its_process_alone(fresh: Setup) -> None:
    """It counts as full; the maps of others are read."""
    damaged, process = attached(fresh)
    process.mappings[process.reply.hold_map_handle][0:8] = bytes(8)
    process.close()
    fence(fresh, damaged, 1)
    session, other = attached(fresh)
    other.close()
    time.sleep(TTL_SECONDS)
    fence(fresh, session, 1)
    wait_until(lambda: told(fresh, session) == [1], "its map is read", 4.0)
    assert told(fresh, damaged) == []
