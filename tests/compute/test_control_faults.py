"""The control stream comes back whatever ended it, and a command's side effects happen once."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import grpc
import pytest

import compute_attached
from compute_control import Chunk, Context, ControlPlane, EngineSession, Uploaded
from compute_engine import running, settings
from compute_harness import Setup
from kvplane.compute import inventory, sockets
from kvplane.compute.state import Holding
from kvplane.v1 import compute_pb2, registry_pb2, types_pb2
from kvplane.wire.status import from_rpc_error


class Faulty(ControlPlane):
    """May end an upload after its first chunk."""

    aborting = False

    def Inventory(self, request_iterator: Iterator[Chunk], context: Context) -> Uploaded:  # noqa: N802
        if self.aborting:
            next(request_iterator)
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        return super().Inventory(request_iterator, context)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[Faulty, Setup]]:
    """A control plane with faults and a shard of this test alone."""
    control = Faulty()
    control.start(f"unix:{tmp_path / 'cache.sock'}")
    with running(settings(tmp_path, max_blocks=4096)) as server:
        control.wait()
        control.create_pool(4096)
        setup = Setup(control, server, server.addresses[0], tmp_path)
        yield control, setup
        setup.close_engines()
    control.stop()


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.02)


def arena_of(setup: Setup, session: EngineSession) -> compute_attached.Attached:
    """A page of shared memory."""
    return compute_attached.attach(
        setup.address,
        session.session_id,
        session.lease_epoch,
        session.secret,
        purpose=compute_pb2.ATTACH_PURPOSE_ARENA,
        arena_bytes=4096,
    )


def arena_bytes(setup: Setup) -> float | None:
    """Bytes of all arenas, as the metrics say."""
    return setup.server.metrics.registry.get_sample_value("kvplane_compute_arena_bytes")


def test_an_upload_that_is_ended_early(faulty: tuple[Faulty, Setup], monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard registers again."""
    control, _ = faulty
    monkeypatch.setattr(inventory, "CHUNK_BLOCKS", 1024)
    chunks = inventory.chunks

    def late(chunk: inventory.Chunk) -> inventory.Chunk:
        def job() -> registry_pb2.InventoryRequest:
            # By then the end of the call is known to the event loop.
            time.sleep(0.2)
            return chunk()

        return job

    def slowly(holding: Holding, request: registry_pb2.RequestInventory) -> Iterator[inventory.Chunk]:
        for index, chunk in enumerate(chunks(holding, request)):
            yield late(chunk) if index else chunk

    monkeypatch.setattr(inventory, "chunks", slowly)
    before, control.aborting = control.shards[0].registration_id, True
    request = registry_pb2.RequestInventory(inventory_id=5, stamps=True)
    control.send(registry_pb2.ControlResponse(request_inventory=request))
    until(lambda: control.shards[0].registration_id > before)
    control.aborting = False
    monkeypatch.undo()
    until(lambda: control.shards[0].streams > 0)
    control.shards[0].sequence -= 1
    assert control.upload(6)[-1].last


def test_a_certificate_that_is_not_there_yet(faulty: tuple[Faulty, Setup], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dialling fails with an error of the file system; the shard dials on."""
    control, setup = faulty
    calls = []

    def missing(_: object) -> grpc.aio.Channel:
        calls.append(1)
        raise FileNotFoundError("ca.pem")

    with monkeypatch.context() as patched:
        patched.setattr(sockets, "cache_channel", missing)
        control.stop()
        until(lambda: len(calls) >= 2)
    control.start(f"unix:{setup.folder / 'cache.sock'}")
    before = control.shards[0].registration_id
    until(lambda: control.shards[0].registration_id > before and control.shards[0].streams > 0)
    control.command(raise_incarnation=registry_pb2.RaiseIncarnation())


def test_a_fence_of_an_older_lease_ends_no_process(setup: Setup) -> None:
    """Its processes are of the newer lease."""
    control = setup.control
    first = control.open_session(types_pb2.SESSION_MODE_ATTACHED)
    second = control.open_session(types_pb2.SESSION_MODE_ATTACHED, resume=first)
    arguments = [setup.address, second.session_id, second.lease_epoch, second.secret.hex(), 0]
    process = subprocess.Popen(
        [sys.executable, compute_attached.__file__, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        control.fence(first, kill=True)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        # A fence that was carried out before does nothing when it comes again.
        control.fence(second)
        number = control.shards[0].sequence
        again = registry_pb2.FenceSession(session_id=second.session_id, lease_epoch=second.lease_epoch, kill=True)
        control.shards[0].sequence = number - 1
        control.send(registry_pb2.ControlResponse(fence_session=again)).result(10)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        process.kill()
        process.communicate()


def test_an_older_lease_is_not_forgotten_again(setup: Setup) -> None:
    """The arenas of the newer one stay."""
    control = setup.control
    first = control.open_session()
    second = control.open_session(resume=first)
    arena = arena_of(setup, second)
    forget = registry_pb2.ForgetSession(session_id=first.session_id, lease_epoch=first.lease_epoch)
    control.command(forget_session=forget)
    assert arena_bytes(setup) == 4096
    arena.close()
    until(lambda: arena_bytes(setup) == 0)


def test_a_fence_is_for_good(setup: Setup) -> None:
    """Serving the same lease once more, as after a restart of the control plane, does not lift it."""
    session = setup.control.open_session()
    setup.control.fence(session)
    served = registry_pb2.ServedSession(
        session_id=session.session_id, lease_epoch=session.lease_epoch, mode=session.mode, max_sequences=8
    )
    digest = sha256(session.secret).digest()
    setup.control.command(serve_session=registry_pb2.ServeSession(session=served, secret_sha256=digest))
    with pytest.raises(grpc.RpcError) as refused:
        setup.engine(session)
    assert from_rpc_error(refused.value).reason == "SESSION_EXPIRED"
    setup.engine(setup.control.open_session(resume=session))
