"""The cache service as a process, killed with SIGKILL, beside a real compute service whose bytes outlive it."""

import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compute_attached
from compute_control import EngineSession
from compute_engine import WRITE_AND_ATTEND, RemoteEngine, running, settings
from compute_oracle import Oracle, assert_attention
from kvplane.client.control import GrpcCacheControl, connect
from kvplane.compute.server import ComputeServer
from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import KvplaneError, NotGrantedError, SessionExpiredError, StaleEpochError
from recovery_engine import RecoveringEngine
from service_rig import wait_until
from tensorless_shard import TensorlessShard
from wire_engine import A, B, WireEngine, admit, advance, commit, new_sequence

MODEL: dict[str, Any] = {
    "weights_revision": "w1",
    "tokenizer_revision": "t1",
    "kv_dtype": "bfloat16",
    "block_tokens": 16,
}
ORACLE = Oracle(2, 2, 4, 16, torch.bfloat16)
TOKENS = list(range(100, 140))
ATTACHED, REMOTE = types_pb2.SESSION_MODE_ATTACHED, types_pb2.SESSION_MODE_REMOTE


class Service:
    """A cache service that can be killed and started again on the same socket."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/cache.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._channels: list[Any] = []
        self.start()

    def start(self) -> None:
        """Start it."""
        flags = ["--listen", self.address, "--metrics-address", "", "--log-level", "error", "--shard-ttl-seconds", "2"]
        self._process = subprocess.Popen([sys.executable, "-m", "kvplane.cache", *flags])

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: nothing is told to anybody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def control(self) -> GrpcCacheControl:
        """A client on a channel of its own, once the service listens."""
        wait_until(self._listens, "the service listens", 30)
        self._channels.append(connect(self.address))
        return GrpcCacheControl(self._channels[-1])

    def pool(self) -> types_pb2.Pool:
        """The pool; an empty one before it is there."""
        try:
            with connect(self.address) as channel:
                return GrpcCacheControl(channel).get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool
        except KvplaneError:
            return types_pb2.Pool()

    def ready(self) -> bool:
        """Whether the pool is open."""
        return self.pool().state == types_pb2.POOL_STATE_READY

    def close(self) -> None:
        """End it and leave no channel."""
        for channel in self._channels:
            channel.close()
        self.kill()

    def _listens(self) -> bool:
        return self.pool().pool_id != ""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


@pytest.fixture
def shard(service: Service, tmp_path: Path) -> Iterator[ComputeServer]:
    with running(settings(tmp_path, **MODEL)) as server:
        wait_until(service.ready, "the pool opens", 30)
        yield server


def remote(engine: WireEngine, shard: ComputeServer) -> RemoteEngine:
    """The engine's way to the bytes."""
    opened = engine.opened
    session = EngineSession(opened.session_id, opened.lease_epoch, opened.session_secret, REMOTE)
    return RemoteEngine(shard.addresses[0], session)


def compute(data: RemoteEngine, sequence: int, tokens: list[int], start: int, *grants: step_pb2.Grant) -> None:
    """Write and attend tokens from `start` on, and check the outputs of every layer."""
    plan = data.plan({sequence: (len(tokens) - start, len(tokens))}, *grants)
    for layer in range(ORACLE.num_layers):
        query, key, value = ORACLE.rows(tokens, start, len(tokens), layer)
        out = data.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
        assert_attention(out, ORACLE.attention(tokens, start, len(tokens), layer))
    data.close_plan(plan)


def granted(engine: WireEngine) -> list[step_pb2.Grant]:
    """The grant of the last answer, if it has one."""
    return [engine.result.grant] if engine.result.HasField("grant") else []


def answer(process: "subprocess.Popen[str]", engine: RecoveringEngine) -> str:
    """The next line of a process; the lease is renewed until it comes."""
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], 0.5)[0]:
        engine.step()
    return process.stdout.readline()


def read_to_the_end(engine: WireEngine) -> None:
    """Read notices until the stream ends with an error."""
    while True:
        engine.stream.receive(20)


def test_a_remote_sequence_decodes_over_a_kill(service: Service, shard: ComputeServer) -> None:
    """The cache service is killed in the middle. Granted work goes on without it; then the session is resumed, old
    grants and leases are refused, and every output before and after is right. Another session hits what was sealed."""
    engine = RecoveringEngine(service.control(), mode=REMOTE)
    data = remote(engine, shard)
    engine.step(admit=admit(new_sequence(A, TOKENS)))
    compute(data, A, TOKENS, 0, *granted(engine))
    engine.step(advance=advance(7, (A, 40, 44)))
    old_grants = granted(engine)
    compute(data, A, [*TOKENS, 7], 40, *old_grants)
    engine.settle()
    incarnation = shard.state.incarnation
    service.kill()
    compute(data, A, [*TOKENS, 7, 8], 41)
    engine.held[A].tokens.append(8)
    engine.held[A].committed = 42
    service.start()
    result = engine.come_back(service.control())
    assert engine.cuts == {}
    assert shard.state.incarnation > incarnation
    with pytest.raises(StaleEpochError):
        data.plan({A: (1, 43)})
    data.close()
    data = remote(engine, shard)
    assert data.apply(result.grant) > 0
    with pytest.raises((StaleEpochError, NotGrantedError)):
        data.apply(*old_grants) if old_grants else data.apply(step_pb2.Grant(body=b"x", mac=b"y" * 32))
    wait_until(service.ready, "the pool opens")
    engine.step(advance=advance(9, (A, 42, 60)))
    compute(data, A, [*TOKENS, 7, 8, 9], 42, *granted(engine))
    engine.step(commit=commit((A, 43)))
    other = WireEngine(service.control(), mode=REMOTE)
    reader = remote(other, shard)
    prompt = [*TOKENS[:36], 1, 2, 3]
    other.step(admit=admit(new_sequence(B, prompt)))
    assert other.admitted()[B][0] == 32
    compute(reader, B, prompt, 32, *granted(other))
    reader.close()
    data.close()


def test_an_attached_process_keeps_its_blocks_until_it_is_gone(service: Service, shard: ComputeServer) -> None:
    """Its engine does not come back after the kill, and its process lives: exactly its blocks stay out of use. When the
    process dies they are back, and what was sealed is hit with its bytes unharmed."""
    engine = RecoveringEngine(service.control(), mode=ATTACHED, ttl_ms=4000)
    opened = engine.opened
    engine.step(admit=admit(new_sequence(A, TOKENS)))
    blocks = list(engine.held[A].table)
    command = [sys.executable, compute_attached.__file__, shard.addresses[0], str(opened.session_id)]
    command += [str(opened.lease_epoch), opened.session_secret.hex(), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert answer(process, engine) == "attached\n"
        for block, generation in blocks:
            process.stdin.write(f"write {block} {generation} {block}\n")
            process.stdin.flush()
            assert answer(process, engine) == "done\n"
        engine.step(commit=commit((A, 40)))
        engine.settle()
        service.kill()
        service.start()
        wait_until(service.ready, "the pool opens", 30)
        stats = service.pool().stats
        assert (stats.held_blocks, stats.quarantined_blocks, stats.cached_blocks) == (0, 3, 0)
        hungry = WireEngine(service.control(), mode=ATTACHED)
        hungry.step(admit=admit(new_sequence(A, list(range(500, 500 + 16 * 61)))))
        assert hungry.states()[A] == ("WAITING", "NO_BLOCKS"), "64 blocks less the null block less three"
        process.kill()
    wait_until(lambda: service.pool().stats.quarantined_blocks == 0, "its blocks are back")
    reader = WireEngine(service.control(), mode=ATTACHED)
    reader.step(admit=admit(new_sequence(B, [*TOKENS[:32], 5])))
    assert reader.admitted()[B][0] == 32
    memory = compute_attached.attach(
        shard.addresses[0], reader.session_id, reader.opened.lease_epoch, reader.opened.session_secret
    )
    for block, _ in blocks[:2]:
        for place in memory.reply.segments:
            found = memory.blocks(place.layer, place.role)[block]
            seed = block + 2 * place.layer + place.role
            assert torch.equal(found, compute_attached.block_bytes(seed, found.shape, found.dtype))
    memory.close()


def test_a_stopped_service_takes_nobody_for_dead(service: Service) -> None:
    """It wakes up after its engines' and shards' time to live: what they sent meanwhile counts first."""
    shard = TensorlessShard(service.address)
    shard.keep_connected()
    wait_until(service.ready, "the pool opens", 30)
    engine = RecoveringEngine(service.control(), [shard], ttl_ms=2000)
    engine.step(admit=admit(new_sequence(A, TOKENS)))
    service.signal(signal.SIGSTOP)
    time.sleep(3)
    service.signal(signal.SIGCONT)
    time.sleep(0.5)
    engine.step(advance=advance(7, (A, 40, 41)))
    assert engine.held[A].running
    time.sleep(2.5)
    with pytest.raises(SessionExpiredError):
        engine.step()
    shard.stop()


def test_both_services_are_restarted(service: Service, tmp_path: Path) -> None:
    """The memory outlives both: sealed blocks are kept, and a remote sequence goes on from its last sealed one, since
    its granted table went with the process."""
    with running(settings(tmp_path, **MODEL)) as shard:
        wait_until(service.ready, "the pool opens", 30)
        engine = RecoveringEngine(service.control(), mode=REMOTE)
        data = remote(engine, shard)
        engine.step(admit=admit(new_sequence(A, TOKENS)))
        compute(data, A, TOKENS, 0, *granted(engine))
        engine.step(commit=commit((A, 40)))
        engine.settle()
        data.close()
        service.kill()
    service.start()
    with running(settings(tmp_path, **MODEL)) as shard:
        result = engine.come_back(service.control())
        assert engine.cuts == {A: (32, "NOT_GRANTED")}
        wait_until(service.ready, "the pool opens", 30)
        data = remote(engine, shard)
        data.apply(result.grant)
        engine.step(extend=step_pb2.Extend(sequence_ids=A.to_bytes(8, "little"), num_slots=(40).to_bytes(4, "little")))
        compute(data, A, TOKENS, 32, *granted(engine))
        engine.step(commit=commit((A, 40)))
        data.close()


def test_a_compute_service_is_restarted(service: Service, tmp_path: Path) -> None:
    """The cache service lives on and begins again with what the shard still holds: the session says what it has, and
    what was sealed is hit with the right bytes."""
    with running(settings(tmp_path, **MODEL)) as shard:
        wait_until(service.ready, "the pool opens", 30)
        engine = RecoveringEngine(service.control(), mode=REMOTE)
        data = remote(engine, shard)
        engine.step(admit=admit(new_sequence(A, TOKENS)))
        compute(data, A, TOKENS, 0, *granted(engine))
        engine.step(commit=commit((A, 40)))
        engine.settle()
        data.close()
    with running(settings(tmp_path, **MODEL)) as shard:
        with pytest.raises(StaleEpochError):
            read_to_the_end(engine)
        result = engine.come_back(service.control())
        assert engine.cuts == {A: (32, "NOT_GRANTED")}
        wait_until(service.ready, "the pool opens", 30)
        data = remote(engine, shard)
        data.apply(result.grant)
        other = WireEngine(service.control(), mode=REMOTE)
        reader = remote(other, shard)
        prompt = [*TOKENS[:36], 1, 2, 3]
        other.step(admit=admit(new_sequence(B, prompt)))
        assert other.admitted()[B][0] == 32
        compute(reader, B, prompt, 32, *granted(other))
        reader.close()
        data.close()


def test_kill_after_kill(service: Service, shard: ComputeServer) -> None:
    """The same session over many starts; each has a higher incarnation, and no output is wrong."""
    engine = RecoveringEngine(service.control(), mode=REMOTE)
    data = remote(engine, shard)
    engine.step(admit=admit(new_sequence(A, TOKENS[:20])))
    tokens, start, seen = list(TOKENS[:20]), 0, {shard.state.incarnation}
    grants = granted(engine)
    for token in range(2):
        compute(data, A, tokens, start, *grants)
        engine.step(advance=advance(token, (A, len(tokens), len(tokens) + 1)))
        start, grants = len(tokens), granted(engine)
        tokens.append(token)
        service.kill()
        service.start()
        begin = time.monotonic()
        result = engine.come_back(service.control())
        assert time.monotonic() - begin < 20
        seen.add(shard.state.incarnation)
        data.close()
        data = remote(engine, shard)
        data.apply(result.grant)
        wait_until(service.ready, "the pool opens")
        engine.step(
            extend=step_pb2.Extend(
                sequence_ids=A.to_bytes(8, "little"), num_slots=(len(tokens) + 4).to_bytes(4, "little")
            )
        )
        grants = granted(engine)
    compute(data, A, tokens, start, *grants)
    assert len(seen) == 3
    data.close()
