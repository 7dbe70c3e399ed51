"""Attaching while the pool, the session or the lease ends; and what is left behind, which is nothing."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import compute_attached
from compute_attached import Attached
from compute_control import EngineSession
from compute_engine import ATTEND, in_arena, inline
from compute_harness import ORACLE, Setup, step
from kvplane import kernels
from kvplane.compute import attach_frames
from kvplane.compute.attach_socket import AttachSocket
from kvplane.v1 import compute_pb2, registry_pb2, types_pb2
from kvplane.wire.errors import LimitExceededError, StaleGenerationError


def attached(setup: Setup, session: EngineSession, rank: int = 0) -> Attached:
    return compute_attached.attach(setup.address, session.session_id, session.lease_epoch, session.secret, rank)


def arena_of(setup: Setup, session: EngineSession, num_bytes: int = 4096) -> Attached:
    return compute_attached.attach(
        setup.address,
        session.session_id,
        session.lease_epoch,
        session.secret,
        purpose=compute_pb2.ATTACH_PURPOSE_ARENA,
        arena_bytes=num_bytes,
    )


def attached_session(setup: Setup, resume: EngineSession | None = None) -> EngineSession:
    return setup.control.open_session(types_pb2.SESSION_MODE_ATTACHED, resume=resume)


def drained_epochs(setup: Setup, session: EngineSession) -> list[int]:
    """Lease epochs of the session's SessionDrained events so far."""
    time.sleep(0.1)
    events = [each.session_drained for each in setup.control.all_events if each.HasField("session_drained")]
    return [each.lease_epoch for each in events if each.session_id == session.session_id]


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def late_replies(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Replies with descriptors wait: the first event says that one does, the second lets it go."""
    waiting, go, send = threading.Event(), threading.Event(), attach_frames.send

    async def late(connection: object, message: object, descriptors: list[int]) -> None:
        if descriptors:
            waiting.set()
            await asyncio.to_thread(go.wait, 10)
        await send(connection, message, descriptors)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(attach_frames, "send", late)
        yield waiting, go


def in_thread(call: Callable[[], Attached]) -> "tuple[threading.Thread, list[Attached]]":
    made: list[Attached] = []
    thread = threading.Thread(target=lambda: made.append(call()))
    thread.start()
    return thread, made


def test_a_pool_that_goes_while_a_process_attaches(fresh: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets the memory that the reply speaks of and not whatever has its descriptors' numbers then."""
    session = attached_session(fresh)
    (folder,) = (fresh.folder / "memory").iterdir()
    inodes = [next(folder.glob(name)).stat().st_ino for name in ("blocks-*", "directory", "stamps")]
    with late_replies(monkeypatch) as (waiting, go):
        thread, made = in_thread(lambda: attached(fresh, session))
        assert waiting.wait(10)
        fresh.control.create_pool(32)
        go.set()
        thread.join()
    (found,) = made
    assert [os.fstat(descriptor).st_ino for descriptor in found.descriptors[:3]] == inodes
    assert found.receive().pool_released.pool_epoch == 1
    found.close()


def test_a_fence_while_a_process_attaches(fresh: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told right after the reply."""
    session = attached_session(fresh)
    with late_replies(monkeypatch) as (waiting, go):
        thread, made = in_thread(lambda: attached(fresh, session))
        assert waiting.wait(10)
        fresh.control.fence(session)
        go.set()
        thread.join()
    made[0].connection.settimeout(5)
    assert made[0].receive().lease_ended.lease_epoch == session.lease_epoch
    made[0].close()


def test_a_drained_process_counts_by_its_lease(fresh: Setup) -> None:
    """What it said of lease 1 is no word on lease 2."""
    first = attached_session(fresh)
    old = attached(fresh, first)
    old.drained(1)
    assert drained_epochs(fresh, first) == [1]
    second = attached_session(fresh, resume=first)
    new = attached(fresh, second, rank=1)
    new.drained(2)
    assert 2 not in drained_epochs(fresh, first)
    old.drained(2)
    assert drained_epochs(fresh, first)[-1] == 2
    old.close()
    new.close()


def test_nothing_is_left_when_a_process_is_refused(fresh: Setup) -> None:
    """The table is full: neither its hold map nor a descriptor of it stays."""
    holding = fresh.server.state.holding
    assert holding is not None
    rows, before = holding.pool.directory.processes, count_descriptors()
    rows["flags"] = 1
    for _ in range(3):
        with pytest.raises(LimitExceededError):
            holding.processes.attach(1, 1, os.getpid(), 0)
    rows["flags"] = 0
    assert count_descriptors() == before
    assert not list(fresh.folder.rglob("hold-*"))


@pytest.mark.parametrize("how", ["destroy_pool", "create_pool"])
def test_nothing_is_left_of_a_released_pool(fresh: Setup, how: str) -> None:
    """Hold maps go with it; the process keeps what it has mapped."""
    found = attached(fresh, attached_session(fresh))
    fresh.control.command(advance_epoch=registry_pb2.AdvanceEpoch(pool_epoch=2, keep_sealed=True))
    fresh.control.pool_epoch = 2
    holding = fresh.server.state.holding
    assert holding is not None
    (process,) = holding.processes.all()
    path = Path(f"/proc/self/fd/{process.hold_map.descriptor}")
    assert "hold-" in str(path.readlink())
    if how == "create_pool":
        fresh.control.create_pool(32)
    else:
        fresh.control.command(destroy_pool=registry_pb2.DestroyPool(pool_epoch=2))
    assert not path.is_symlink() or "hold-" not in str(path.readlink())
    assert not list(fresh.folder.rglob("hold-*"))
    assert found.receive().pool_released.pool_epoch == 2
    assert fresh.server.metrics.registry.get_sample_value("kvplane_compute_attached_processes") == 0
    found.close()


def test_accepting_goes_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as too many open files."""
    accept = asyncio.SelectorEventLoop.sock_accept
    failed: list[int] = []

    async def flaky(loop: asyncio.SelectorEventLoop, listener: object) -> object:
        if not failed:
            failed.append(1)
            raise OSError(24, "Too many open files")
        return await accept(loop, listener)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", flaky)

    async def serve() -> None:
        listening = AttachSocket(tmp_path / "attach.sock", None)  # type: ignore[arg-type]
        listening.start()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(listening.path))
            connection.sendall(bytes(4))
            message, _ = await asyncio.to_thread(compute_attached.receive, connection)
            assert message.reply.status.code
        await listening.stop()

    asyncio.run(serve())


def test_a_new_occupant_while_a_kernel_reads(fresh: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attached process stamps a block and writes it in the middle of a remote run: that one answers nothing."""
    memory_of = attached(fresh, attached_session(fresh))
    engine, ((block, generation),) = fresh.engine(), (blocks := fresh.blocks(1))
    step(engine, 0, [1, 2, 3, 4], 0, fresh.control.grant(engine.session, {0: (0, blocks)}))
    plan, attend = engine.plan({0: (1, 4)}), kernels.attend
    arena = arena_of(fresh, engine.session)
    query = ORACLE.rows([1, 2, 3, 4], 3, 4, 0)[0]
    out = in_arena("out", query.shape, query.dtype, arena.reply.arena_id, 0)
    engine.run(plan, 0, ATTEND, inline("query", query), out)
    before = bytes(arena.mappings[0][: query.nbytes])
    assert any(before)

    def raced(*given: object, **named: object) -> None:
        memory_of.stamps[block] = generation + 1000
        memory_of.blocks(0, types_pb2.TENSOR_ROLE_VALUE)[block] = 777.0
        attend(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "attend", raced)
    with pytest.raises(StaleGenerationError):
        engine.run(plan, 0, ATTEND, inline("query", query), out)
    assert bytes(arena.mappings[0][: query.nbytes]) == before
    memory_of.close()
    arena.close()
