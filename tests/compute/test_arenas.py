"""Arenas: few, within their session's life, and made without holding anybody up."""

import threading
import time

import pytest

import compute_attached
from compute_attached import Attached
from compute_control import EngineSession
from compute_harness import Setup
from kvplane.compute import memory
from kvplane.v1 import compute_pb2, registry_pb2
from kvplane.wire.errors import KvplaneError, LimitExceededError, PermissionDeniedError


def arena_of(setup: Setup, session: EngineSession, num_bytes: int = 4096) -> Attached:
    return compute_attached.attach(
        setup.address,
        session.session_id,
        session.lease_epoch,
        session.secret,
        purpose=compute_pb2.ATTACH_PURPOSE_ARENA,
        arena_bytes=num_bytes,
    )


def test_arenas_are_few(fresh: Setup) -> None:
    session = fresh.control.open_session()
    made = [arena_of(fresh, session) for _ in range(8)]
    with pytest.raises(LimitExceededError) as refused:
        arena_of(fresh, session)
    assert refused.value.metadata["limit"] == "session_arenas"
    made.pop().close()
    time.sleep(0.1)
    made += [arena_of(fresh, session), arena_of(fresh, fresh.control.open_session())]
    for each in made:
        each.close()


def test_arenas_end_with_the_pool(fresh: Setup) -> None:
    """Their sessions do."""
    arena = arena_of(fresh, fresh.control.open_session())
    fresh.control.create_pool(64)
    assert fresh.server.metrics.registry.get_sample_value("kvplane_compute_arena_bytes") == 0
    arena.close()


def test_a_session_that_ends_while_its_arena_is_made(fresh: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets none; and everybody else is served meanwhile."""
    session, making, go, create = (
        fresh.control.open_session(),
        threading.Event(),
        threading.Event(),
        memory.create_arena,
    )

    def slowly(name: str, num_bytes: int) -> memory.SharedMemory:
        making.set()
        assert go.wait(10)
        return create(name, num_bytes)

    monkeypatch.setattr(memory, "create_arena", slowly)
    errors: list[KvplaneError] = []

    def ask() -> None:
        try:
            arena_of(fresh, session)
        except KvplaneError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert making.wait(10)
    forget = registry_pb2.ForgetSession(session_id=session.session_id, lease_epoch=session.lease_epoch)
    fresh.control.command(forget_session=forget)
    go.set()
    thread.join()
    assert [type(each) for each in errors] == [PermissionDeniedError]
    assert fresh.server.metrics.registry.get_sample_value("kvplane_compute_arena_bytes") == 0
