"""The control stream comes back whatever ended it, and what commands do besides happens once and only when it should."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from compute_control import Chunk, Context, ControlPlane, Uploaded
from compute_engine import running, settings
from compute_harness import Setup
from kvplane.compute import inventory, sockets
from kvplane.compute.state import Holding
from kvplane.v1 import registry_pb2


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


def test_an_upload_that_is_ended_early(faulty: tuple[Faulty, Setup], monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard registers again."""
    control, _ = faulty
    monkeypatch.setattr(inventory, "CHUNK_BLOCKS", 1024)
    at_once = inventory._blocks

    def slowly(holding: Holding, request: registry_pb2.RequestInventory, first: int) -> registry_pb2.InventoryRequest:
        # By the second chunk the end of the call is known here.
        time.sleep(0.2 if first == 1024 else 0)
        return at_once(holding, request, first)

    monkeypatch.setattr(inventory, "_blocks", slowly)
    before, control.aborting = control.shards[0].registration_id, True
    request = registry_pb2.RequestInventory(inventory_id=5, stamps=True)
    control.send(registry_pb2.ControlResponse(request_inventory=request))
    until(lambda: control.shards[0].registration_id > before)
    control.aborting = False
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
