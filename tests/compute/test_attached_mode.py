"""Attached mode: other processes map the pool; what they may touch is known until they are gone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

import compute_attached
from compute_attached import attach, block_bytes
from compute_control import EngineSession
from compute_engine import read_request
from compute_harness import Setup
from kvplane.v1 import compute_pb2, registry_pb2, types_pb2
from kvplane.wire import stamps
from kvplane.wire.errors import (
    InvalidArgumentError,
    KvplaneError,
    LimitExceededError,
    SessionExpiredError,
    UnauthenticatedError,
)
from kvplane.wire.status import from_rpc_error

Worker = "subprocess.Popen[str]"


@pytest.fixture
def start(setup: Setup) -> "Iterator[Callable[[EngineSession, int], subprocess.Popen[str]]]":
    """Start attached processes; they are ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def make(session: EngineSession, rank: int = 0) -> "subprocess.Popen[str]":
        arguments = [setup.address, session.session_id, session.lease_epoch, session.secret.hex(), rank]
        process = subprocess.Popen(
            [sys.executable, compute_attached.__file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert answer(process) == "attached"
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()
    drain_events(setup)


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert answer(process) == "done"


def drain_events(setup: Setup) -> None:
    time.sleep(0.05)
    while not setup.control.events.empty():
        setup.control.events.get()


def attached_session(setup: Setup) -> EngineSession:
    return setup.control.open_session(types_pb2.SESSION_MODE_ATTACHED)


def test_bytes_written_by_another_process(
    setup: Setup, start: "Callable[[EngineSession, int], subprocess.Popen[str]]"
) -> None:
    """What a second process wrote is what this one maps and what ReadBlocks answers, byte for byte."""
    session = attached_session(setup)
    process = start(session, 0)
    blocks = setup.blocks(1)
    block, generation = blocks[0]
    tell(process, f"write {block} {generation} 99")
    assert setup.control.seal(blocks) == [True]
    reader = attach(setup.address, session.session_id, session.lease_epoch, session.secret, rank=1)
    for place in reader.reply.segments:
        tensor = reader.blocks(place.layer, place.role)
        expected = block_bytes(99 + 2 * place.layer + place.role, tensor[block].shape, tensor.dtype)
        assert tensor[block].equal(expected)
    assert reader.directory.blocks[block]["generation"] == generation
    assert stamps.held_blocks(reader.hold_map).tolist() == []
    engine = setup.engine(setup.control.open_session())
    engine.apply(setup.control.grant(engine.session, {0: (0, blocks)}))
    for piece in engine.stub.ReadBlocks(read_request(engine.session, blocks)):
        tensor = reader.blocks(piece.piece.layer, piece.piece.role)
        assert piece.piece.payload == tensor[block].transpose(0, 1).contiguous().numpy().tobytes()
    reader.close()


def test_hold_maps_reach_the_control_plane_and_outlive_the_connection(
    setup: Setup, start: "Callable[[EngineSession, int], subprocess.Popen[str]]"
) -> None:
    """The bits of a killed process are there until its end was confirmed; then it is forgotten."""
    session = attached_session(setup)
    process = start(session, 3)
    attached = setup.control.wait_event("session_attached").session_attached
    assert (attached.session_id, attached.process.pid, attached.process.rank) == (session.session_id, process.pid, 3)
    blocks = setup.blocks(1)
    tell(process, f"write {blocks[0][0]} {blocks[0][1]} 1")
    maps = [each for chunk in setup.control.upload(11, hold_maps=True) for each in chunk.hold_maps]
    (found,) = [each for each in maps if each.process.pid == process.pid]
    assert stamps.held_blocks(np.frombuffer(found.bitmap, np.uint8)).tolist() == [blocks[0][0]]
    assert (found.session_id, found.lease_epoch) == (session.session_id, session.lease_epoch)
    process.send_signal(signal.SIGKILL)
    gone = setup.control.wait_event("process_gone").process_gone
    assert (gone.session_id, gone.process, gone.remaining) == (session.session_id, attached.process, 0)
    time.sleep(0.1)
    maps = [each for chunk in setup.control.upload(12, hold_maps=True) for each in chunk.hold_maps]
    assert not [each for each in maps if each.process.pid == process.pid]


def test_several_processes_of_one_session(
    setup: Setup, start: "Callable[[EngineSession, int], subprocess.Popen[str]]"
) -> None:
    """Each end is counted; the session is drained when all of them said so."""
    session = attached_session(setup)
    first, second = start(session, 0), start(session, 1)
    tell(first, "drain")
    tell(second, "drain")
    assert setup.control.wait_event("session_drained").session_drained.session_id == session.session_id
    first.kill()
    assert setup.control.wait_event("process_gone").process_gone.remaining == 1
    second.kill()
    assert setup.control.wait_event("process_gone").process_gone.remaining == 0


def test_a_process_that_dies_undrained(
    setup: Setup, start: "Callable[[EngineSession, int], subprocess.Popen[str]]"
) -> None:
    """The session is drained when all that are left have said so."""
    session = attached_session(setup)
    first, second = start(session, 0), start(session, 1)
    tell(first, "drain")
    second.kill()
    assert setup.control.wait_event("session_drained").session_drained.session_id == session.session_id
    first.kill()
    setup.control.wait_event("process_gone")


def test_a_fence_tells_the_process(setup: Setup) -> None:
    session = attached_session(setup)
    memory = attach(setup.address, session.session_id, session.lease_epoch, session.secret)
    setup.control.fence(session)
    assert memory.receive().lease_ended.lease_epoch == session.lease_epoch
    memory.drained(session.lease_epoch)
    assert setup.control.wait_event("session_drained").session_drained.session_id == session.session_id
    memory.close()
    with pytest.raises(grpc.RpcError) as refused:
        attach(setup.address, session.session_id, session.lease_epoch, session.secret)
    assert isinstance(from_rpc_error(refused.value), SessionExpiredError)


def test_an_operator_may_end_a_process(
    setup: Setup, start: "Callable[[EngineSession, int], subprocess.Popen[str]]"
) -> None:
    session = attached_session(setup)
    process = start(session, 0)
    setup.control.fence(session, kill=True)
    assert process.wait(10) == -signal.SIGKILL


def test_the_directory_cannot_be_written(setup: Setup) -> None:
    session = attached_session(setup)
    memory = attach(setup.address, session.session_id, session.lease_epoch, session.secret)
    descriptor = memory.descriptors[memory.reply.directory_handle]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    memory.close()


def test_tickets_are_good_once(setup: Setup) -> None:
    session = attached_session(setup)
    request = compute_pb2.AttachRequest(
        session_id=session.session_id,
        lease_epoch=session.lease_epoch,
        session_secret=session.secret,
        purpose=compute_pb2.ATTACH_PURPOSE_POOL,
    )
    answered = setup.engine(setup.control.open_session()).stub.Attach(request)
    compute_attached.hello(answered.socket_path, answered.ticket).close()
    for ticket in (answered.ticket, b"", bytes(32)):
        with pytest.raises(UnauthenticatedError):
            compute_attached.hello(answered.socket_path, ticket)


def test_remote_sessions_map_no_pool(setup: Setup) -> None:
    session = setup.control.open_session()
    with pytest.raises(grpc.RpcError) as refused:
        attach(setup.address, session.session_id, session.lease_epoch, session.secret)
    assert from_rpc_error(refused.value).reason == "PERMISSION_DENIED"


def test_garbage_on_the_attach_socket(setup: Setup) -> None:
    """It is refused, and the next one is served."""
    path = str(setup.server.config.attach_socket)
    for garbage in (b"\xff\xff\xff\xff", b"\x03\x00\x00\x00\xff\xff\xff", b"\x00\x00\x00\x00"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(garbage)
            message, _ = compute_attached.receive(connection)
            assert message.reply.status.code
    test_tickets_are_good_once(setup)


def test_events_come_again_until_they_are_confirmed(setup: Setup) -> None:
    """On a new stream, with the number they had."""
    drain_events(setup)
    setup.control.confirm_events = False
    session = attached_session(setup)
    memory = attach(setup.address, session.session_id, session.lease_epoch, session.secret)
    first = setup.control.events.get(timeout=10)
    setup.control.stop()
    setup.control.confirm_events = True
    setup.control.start(f"unix:{setup.folder / 'cache.sock'}")
    again = setup.control.events.get(timeout=10)
    assert again == first
    assert again.session_attached.session_id == session.session_id
    memory.close()
    setup.control.command(raise_incarnation=registry_pb2.RaiseIncarnation())


def test_inline_and_arena_give_the_same_bytes(setup: Setup) -> None:
    """The same run through a shared arena and through the message."""
    from compute_engine import WRITE_AND_ATTEND, in_arena
    from compute_harness import ORACLE

    engine = setup.engine(setup.control.open_session())
    session = engine.session
    arena = attach(
        setup.address,
        session.session_id,
        session.lease_epoch,
        session.secret,
        purpose=compute_pb2.ATTACH_PURPOSE_ARENA,
        arena_bytes=1 << 16,
    )
    view = np.frombuffer(arena.mappings[0], np.uint8)
    outs = []
    for sequence in (0, 1):
        engine.apply(setup.control.grant(session, {sequence: (0, setup.blocks(2))}))
        plan = engine.plan({sequence: (5, 5)})
        query, key, value = ORACLE.rows([1, 2, 3, 4, 5], 0, 5, 0)
        if sequence == 0:
            outs.append(engine.run(plan, 0, WRITE_AND_ATTEND, query=query, key=key, value=value).numpy().tobytes())
            continue
        tensors, offset = [], 0
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            view[offset : offset + tensor.nbytes] = tensor.contiguous().view(-1).numpy().view(np.uint8)
            tensors.append(in_arena(name, tensor.shape, tensor.dtype, arena.reply.arena_id, offset))
            offset += -(-tensor.nbytes // 64) * 64
        tensors.append(in_arena("out", query.shape, query.dtype, arena.reply.arena_id, offset))
        engine.run(plan, 0, WRITE_AND_ATTEND, *tensors)
        outs.append(view[offset : offset + query.nbytes].tobytes())
        bad = [
            in_arena("out", query.shape, query.dtype, arena.reply.arena_id, (1 << 16) - 64),
            in_arena("out", query.shape, query.dtype, arena.reply.arena_id, 8),
            in_arena("out", query.shape, query.dtype, arena.reply.arena_id, 0),
            in_arena("out", query.shape, query.dtype, 999, offset),
        ]
        for out in bad:
            with pytest.raises(InvalidArgumentError):
                engine.run(plan, 0, WRITE_AND_ATTEND, *tensors[:3], out)
    assert outs[0] == outs[1]
    arena.close()


def test_an_exhausted_arena_budget(setup: Setup) -> None:
    session = setup.control.open_session()
    limit = setup.server.config.arena_bytes

    def ask(num_bytes: int) -> compute_attached.Attached:
        return attach(
            setup.address,
            session.session_id,
            session.lease_epoch,
            session.secret,
            purpose=compute_pb2.ATTACH_PURPOSE_ARENA,
            arena_bytes=num_bytes,
        )

    with pytest.raises(LimitExceededError) as refused:
        ask(limit + 1)
    assert refused.value.metadata["limit"] == "arena_bytes"
    with pytest.raises(KvplaneError):
        ask(0)
    first = ask(1 << 20)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(first.descriptors[0], 0)
    first.close()
