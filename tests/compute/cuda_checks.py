"""The compute service with `--device cuda`, on an emulated device (test_cuda.py runs it, in a process of its own).

There, device memory is files, handles are paths to them, and kernels run in Triton's interpreter; everything else is
the service as it runs on a GPU. Without KVPLANE_EMULATE_CUDA=1 it needs one (benchmarks/gpu.sh).
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cuda_attached
from compute_access import Engine as SdkEngine
from compute_attached import block_bytes
from compute_control import ControlPlane
from compute_engine import running, settings, spawn
from compute_harness import BLOCK_TOKENS, Setup, step
from compute_oracle import Oracle, assert_attention
from kvplane.client import Session
from kvplane.client.compute import open_compute
from kvplane.compute.device import CudaDevice, DeviceBlocks
from kvplane.kernels.cuda.emulated_runtime import DEVICE_BYTES
from kvplane.v1 import types_pb2
from kvplane.wire.errors import LimitExceededError
from service_rig import RunningService

ORACLE = Oracle(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, dtype=torch.float32)


@pytest.fixture
def cuda(tmp_path: Path) -> Iterator[Setup]:
    control = ControlPlane().start(f"unix:{tmp_path / 'cache.sock'}")
    with running(settings(tmp_path) | {"device": "cuda:0", "head_dim": 64}) as server:
        control.wait()
        control.create_pool(64)
        setup = Setup(control, server, server.addresses[0], tmp_path)
        yield setup
        setup.close_engines()
    control.stop()


def test_registration_names_the_device(cuda: Setup) -> None:
    device = cuda.control.shards[0].register.device
    assert device.name
    assert device.available_bytes > 0
    assert cuda.server.state.holding is not None
    assert isinstance(cuda.server.state.holding.pool.blocks_memory, DeviceBlocks)
    assert not list(cuda.folder.glob("memory/*/blocks-*")), "blocks are not in shared memory"


def test_remote_steps_match_the_oracle(cuda: Setup) -> None:
    engine = cuda.engine()
    tokens = list(range(10))
    grant = cuda.control.grant(engine.session, {1: (0, cuda.blocks(3))})
    for start, end, grants in ((0, 7, [grant]), (7, 8, []), (8, 10, [])):
        outs = step(engine, 1, tokens[:end], start, *grants, oracle=ORACLE)
        for layer, out in enumerate(outs):
            assert_attention(out, ORACLE.attention(tokens[:end], start, end, layer))


class Engine:
    """An attached process."""

    def __init__(self, setup: Setup) -> None:
        session = setup.control.open_session(mode=types_pb2.SESSION_MODE_ATTACHED)
        numbers = (session.session_id, session.lease_epoch, session.secret.hex(), 0)
        command = [sys.executable, cuda_attached.__file__, setup.address, *map(str, numbers)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "attached"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def keys_of(setup: Setup, layer: int, block: int) -> Tensor:
    assert setup.server.state.holding is not None
    return setup.server.state.holding.pool.layers[layer].keys[0][block]


def test_an_attached_process_works_on_the_same_bytes(cuda: Setup) -> None:
    engine = Engine(cuda)
    try:
        blocks = cuda.blocks(1)
        ((block, generation),) = blocks
        assert engine.ask("write", block, generation, 7) == "written"
        expected = block_bytes(7 + 2 * 1 + types_pb2.TENSOR_ROLE_KEY, keys_of(cuda, 1, 1).shape, torch.float32)
        assert torch.equal(keys_of(cuda, 1, block).cpu(), expected)
        cuda.server.state.identity.device.run(lambda: keys_of(cuda, 0, 9).fill_(3.0))
        assert engine.ask("sum", 0, types_pb2.TENSOR_ROLE_KEY, 9) == str(3.0 * 2 * BLOCK_TOKENS * 64)
        assert engine.ask("event") == "waited"
        assert engine.ask("bad-handle").startswith("device: opening another process's device memory")
    finally:
        engine.end()


def test_sessions_of_the_sdk_attach_to_device_memory(tmp_path: Path) -> None:
    """Prefill in two chunks, and a hit by another session, on a pool of another process; every output is checked."""
    service = RunningService(tmp_path, watermark=0.0)
    model = {"device": "cuda:0", "head_dim": 64, "kv_dtype": "float32", "tokenizer_revision": "t"}
    shard = spawn(settings(tmp_path) | model | {"num_layers": ORACLE.num_layers, "num_kv_heads": ORACLE.num_kv_heads})
    try:
        service.wait_ready()
        with (
            Session.open(address=service.address) as one,
            Session.open(address=service.address) as two,
            open_compute(one) as first_compute,
            open_compute(two) as second_compute,
        ):
            first = SdkEngine(one, first_compute, ORACLE, None)
            prompt = list(range(2 * BLOCK_TOKENS + 3))
            sequence = first.admit(prompt)
            first.forward(sequence, ends={sequence: BLOCK_TOKENS + 1})
            first.forward(sequence)
            draft = one.draft()
            draft.commit(sequence, len(prompt))
            one.run(draft)
            one.flush()
            second = SdkEngine(two, second_compute, ORACLE, None)
            other = second.admit(prompt)
            assert second.written[other] == 2 * BLOCK_TOKENS
            second.forward(other)
        service.check_integrity()
    finally:
        shard.terminate()
        shard.wait(20)
        service.stop()


def test_memory_is_freed_only_when_those_who_opened_it_are_gone(cuda: Setup) -> None:
    device = cuda.server.state.identity.device
    assert isinstance(device, CudaDevice)
    free = device.available_bytes()
    engine = Engine(cuda)
    cuda.control.create_pool(32)
    assert cuda.server.state.holding is not None
    smaller = cuda.server.state.holding.pool.pool_bytes
    assert device.available_bytes() == free - smaller, "an attached process has the old pool's memory open"
    engine.end()
    cuda.control.create_pool(64)
    assert device.available_bytes() == free, "the old pools' memory is free again"


def test_a_pool_that_does_not_fit_says_so(cuda: Setup) -> None:
    device = cuda.server.state.identity.device
    with pytest.raises(LimitExceededError, match=r"bytes of device memory, .* are free: out of memory"):
        device.allocate(Path("unused"), DEVICE_BYTES + 1)


def test_a_restart_finds_no_blocks_and_says_so_to_those_who_look(tmp_path: Path) -> None:
    control = ControlPlane().start(f"unix:{tmp_path / 'cache.sock'}")
    values = settings(tmp_path) | {"device": "cuda", "head_dim": 64}
    with running(values) as server:
        control.wait()
        control.create_pool(8)
        left = server.state.holding
        server.state.holding = None  # as if the process had died: nothing is given up at its end
    assert left is not None
    assert left.pool.directory.header["valid"][0]
    with running(values) as server:
        control.wait()
        assert server.state.holding is None
    assert not left.pool.directory.header["valid"][0]
    left.pool.blocks_memory.release((), unlink=True)
    control.stop()


def test_a_model_without_kernels_is_refused_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="device: cuda:0 cannot serve this model: head_dim: 48"),
        running(settings(tmp_path) | {"device": "cuda", "head_dim": 48}),
    ):
        pass


def test_a_share_of_the_free_memory(tmp_path: Path) -> None:
    control = ControlPlane().start(f"unix:{tmp_path / 'cache.sock'}")
    changes = {"device": "cuda", "head_dim": 64, "pool_bytes": None, "max_blocks": None, "pool_share": 0.25}
    with running(settings(tmp_path) | changes):
        control.wait()
        register = control.shards[0].register
        block_bytes = 2 * 2 * 2 * BLOCK_TOKENS * 64 * 4
        assert register.max_blocks == DEVICE_BYTES // 4 // block_bytes
    control.stop()
