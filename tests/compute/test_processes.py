"""Real processes that die: engines, the compute service, and many of them at once."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import compute_attached
import compute_load
from compute_control import Blocks, ControlPlane
from compute_engine import RemoteEngine, flags, read_request, running, settings, spawn
from compute_harness import ORACLE, Setup, step
from compute_oracle import assert_attention
from kvplane.v1 import registry_pb2, step_pb2, types_pb2
from kvplane.wire import directory, stamps
from kvplane.wire.errors import KvplaneError, UnavailableError

Processes = list["subprocess.Popen[Any]"]


@pytest.fixture
def processes() -> Iterator[Processes]:
    """What a test starts is ended after it."""
    started: Processes = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlPlane]:
    plane = ControlPlane().start(f"unix:{tmp_path / 'cache.sock'}")
    yield plane
    plane.stop()


def reset(body: step_pb2.GrantBody) -> None:
    body.reset = True


def load(processes: Processes, setup: Setup, folder: Path, sequences: int, steps: int) -> "subprocess.Popen[str]":
    """Start an engine process with a table for every sequence."""
    session = setup.control.open_session()
    tables = {sequence: (0, setup.blocks(3)) for sequence in range(sequences)}
    path = folder / f"grant-{session.session_id}"
    path.write_bytes(setup.control.grant(session, tables).SerializeToString())
    arguments = [setup.address, session.session_id, session.lease_epoch, session.secret.hex(), path, sequences, steps]
    process = subprocess.Popen(
        [sys.executable, compute_load.__file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    processes.append(process)
    return process


def test_two_engines_with_64_sequences_each(processes: Processes, control: ControlPlane, tmp_path: Path) -> None:
    """Both decode at the same time; every output of both is right."""
    with running(settings(tmp_path, max_blocks=512)) as server:
        control.wait()
        control.create_pool(512)
        setup = Setup(control, server, server.addresses[0], tmp_path, pool_blocks=512)
        engines = [load(processes, setup, tmp_path, 64, 4) for _ in range(2)]
        for engine in engines:
            output, _ = engine.communicate(timeout=60)
            assert output.split() == ["begun", "right"]
            assert engine.returncode == 0


def test_an_engine_that_dies_leaves_no_plan_open(processes: Processes, setup: Setup, tmp_path: Path) -> None:
    """Its blocks get new occupants as soon as its stream is gone."""
    engine = load(processes, setup, tmp_path, 4, 0)
    assert engine.stdout is not None
    assert engine.stdout.readline().strip() == "begun"
    engine.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while setup.server._gauges().open_plans and time.monotonic() < deadline:  # noqa: SLF001
        time.sleep(0.02)
    other = setup.engine()
    ids = list(range(1, 64))
    grant = setup.control.grant(other.session, {0: (0, setup.control.new_blocks(ids))})
    while True:
        try:
            step(other, 0, list(range(200)), 0, grant)
            return
        except UnavailableError:
            # The dead engine was between two plans, and the next one was on its way.
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_sealed_blocks_survive_the_service(processes: Processes, control: ControlPlane, tmp_path: Path) -> None:
    """Killed and started again: sealed bytes are the same, unsealed and torn rows do not count."""
    values = settings(tmp_path)
    first = spawn(values)
    processes.append(first)
    control.wait()
    control.create_pool(64)
    address = values["listen"][0]
    engine = RemoteEngine(address, control.open_session())
    tokens = list(range(30, 41))
    blocks = control.new_blocks([1, 2, 3])
    step(engine, 0, tokens, 0, control.grant(engine.session, {0: (0, blocks)}))
    assert control.seal(blocks[:2]) == [True, True]
    before = bytes_of(engine, blocks[:1])
    boot = control.shards[0].register.boot_id
    first.send_signal(signal.SIGKILL)
    first.wait()
    engine.close()
    tear(tmp_path / "memory" / "default-0" / "directory", 2)
    processes.append(spawn(values))
    wait_new_boot(control, boot)
    held = control.shards[0].register.held_pool
    assert (held.num_blocks, held.pool_epoch) == (64, 1)
    assert [(each.session_id, each.last_grant) for each in held.sessions] == [(engine.session.session_id, 1)]
    control.command(advance_epoch=registry_pb2.AdvanceEpoch(pool_epoch=2, keep_sealed=True))
    control.pool_epoch = 2
    chunks = control.upload(stamps=True)
    rows = np.frombuffer(b"".join(chunk.rows for chunk in chunks), directory.BLOCK_ROW)
    marks = np.frombuffer(b"".join(chunk.stamps for chunk in chunks), "<u8")
    assert np.flatnonzero(directory.sealed_mask(rows, marks)).tolist() == [1]
    again = RemoteEngine(address, control.open_session(resume=engine.session))
    own = control.new_blocks([10, 11])
    with pytest.raises(KvplaneError, match="lost"):
        again.apply(control.grant(again.session, {0: (0, own)}))
    again.apply(control.grant(again.session, {0: (0, [blocks[0], *own])}, reset))
    assert bytes_of(again, blocks[:1]) == before
    for layer, out in enumerate(step(again, 0, tokens, 4)):
        assert_attention(out, ORACLE.attention(tokens, 4, len(tokens), layer))
    with pytest.raises(grpc.RpcError):
        bytes_of(again, blocks[1:2])
    again.close()


def bytes_of(engine: RemoteEngine, blocks: Blocks) -> list[bytes]:
    """Per piece the blocks' bytes."""
    return [each.piece.payload for each in engine.stub.ReadBlocks(read_request(engine.session, blocks))]


def tear(path: Path, block: int) -> None:
    """Change a digest of a sealed row as a writer would that died half way."""
    with path.open("r+b") as file:
        header = np.frombuffer(file.read(directory.HEADER_BYTES), directory.HEADER)
        file.seek(int(header["rows_offset"][0]) + block * directory.BLOCK_ROW.itemsize + 40)
        file.write(b"torn")


def wait_new_boot(control: ControlPlane, boot: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        shard = control.shards[0]
        if shard.register.boot_id != boot and shard.streams:
            return
        time.sleep(0.02)
    raise AssertionError("the service did not come back")


def test_attached_processes_survive_the_service(processes: Processes, control: ControlPlane, tmp_path: Path) -> None:
    """The next process finds them again: hold maps are reported, and their end is seen."""
    values = settings(tmp_path)
    first = spawn(values)
    processes.append(first)
    control.wait()
    control.create_pool(64)
    session = control.open_session(types_pb2.SESSION_MODE_ATTACHED)
    arguments = [values["listen"][0], session.session_id, session.lease_epoch, session.secret.hex(), 0]
    engine = subprocess.Popen(
        [sys.executable, compute_attached.__file__, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    processes.append(engine)
    assert engine.stdout is not None
    assert engine.stdin is not None
    engine.stdout.readline()
    (block,) = control.new_blocks([7])
    engine.stdin.write(f"write {block[0]} {block[1]} 5\n")
    engine.stdin.flush()
    engine.stdout.readline()
    boot = control.shards[0].register.boot_id
    first.kill()
    first.wait()
    processes.append(spawn(values))
    wait_new_boot(control, boot)
    (held,) = control.shards[0].register.held_pool.sessions
    assert [each.pid for each in held.processes] == [engine.pid]
    (found,) = [each for chunk in control.upload(hold_maps=True) for each in chunk.hold_maps]
    assert stamps.held_blocks(np.frombuffer(found.bitmap, np.uint8)).tolist() == [7]
    engine.kill()
    assert control.wait_event("process_gone").process_gone.process.pid == engine.pid


def test_cuda_without_cuda_fails_with_one_line(tmp_path: Path) -> None:
    process = spawn(settings(tmp_path) | {"device": "cuda"}, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    (line,) = errors.decode().splitlines()
    assert line.startswith("kvplane-compute: device: cuda:0 cannot be used: ")


def test_auto_takes_the_cpu_without_cuda(tmp_path: Path) -> None:
    process = spawn(settings(tmp_path) | {"device": "auto", "log_format": "json"}, stderr=subprocess.PIPE)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.decode())
        if "listening" in lines[-1]:
            break
    process.terminate()
    process.communicate(timeout=30)
    assert any("no_cuda" in line for line in lines), lines
    assert any('"device": "host memory"' in line for line in lines), lines


def test_a_bad_key_is_named(tmp_path: Path) -> None:
    process = spawn(settings(tmp_path) | {"block-tokens": 12}, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "block_tokens" in errors.decode()


def test_sigterm_drains(processes: Processes, control: ControlPlane, tmp_path: Path) -> None:
    """The sockets are gone, the memory is not."""
    values = settings(tmp_path)
    process = spawn(values, stderr=subprocess.PIPE)
    processes.append(process)
    control.wait()
    control.create_pool(16)
    assert subprocess.run([sys.executable, "-m", "kvplane.compute", *flags(values), "--check"]).returncode == 0
    process.terminate()
    assert process.wait(20) == 0
    assert not (tmp_path / "compute.sock").exists()
    assert (tmp_path / "memory" / "default-0" / "directory").exists()
