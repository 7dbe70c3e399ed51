"""Both services together: what the control plane grants is what the shard executes, over a crash of either."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compute_control import EngineSession
from compute_engine import WRITE_AND_ATTEND, RemoteEngine, running, settings
from compute_oracle import Oracle, assert_attention
from kvplane.compute.server import ComputeServer
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import KvplaneError
from service_rig import RunningService, wait_until
from wire_engine import A, B, WireEngine, admit, advance, commit, finish, new_sequence

MODEL: dict[str, Any] = {
    "weights_revision": "w1",
    "tokenizer_revision": "t1",
    "kv_dtype": "bfloat16",
    "block_tokens": 16,
}
ORACLE = Oracle(2, 2, 4, 16, torch.bfloat16)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    made = RunningService(tmp_path, shard_ttl_seconds=2.0)
    yield made
    made.stop()


@pytest.fixture
def shard(service: RunningService, tmp_path: Path) -> Iterator[ComputeServer]:
    with running(settings(tmp_path, **MODEL)) as server:
        service.wait_ready()
        yield server


def remote(engine: WireEngine, shard: ComputeServer) -> RemoteEngine:
    """The engine's way to the bytes."""
    opened = engine.opened
    session = EngineSession(opened.session_id, opened.lease_epoch, opened.session_secret, types_pb2.SESSION_MODE_REMOTE)
    return RemoteEngine(shard.addresses[0], session)


def compute(data: RemoteEngine, engine: WireEngine, sequence: int, tokens: list[int], start: int) -> None:
    """Execute what the last step granted and check the outputs."""
    grants = [engine.result.grant] if engine.result.HasField("grant") else []
    plan = data.plan({sequence: (len(tokens) - start, len(tokens))}, *grants)
    for layer in range(ORACLE.num_layers):
        query, key, value = ORACLE.rows(tokens, start, len(tokens), layer)
        out = data.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
        assert_attention(out, ORACLE.attention(tokens, start, len(tokens), layer))
    data.close_plan(plan)


def new_engine(service: RunningService) -> WireEngine:
    return WireEngine(service.control(), mode=types_pb2.SESSION_MODE_REMOTE)


def test_a_prefix_of_one_session_is_hit_by_another(service: RunningService, shard: ComputeServer) -> None:
    """Admit, compute, commit, seal; then another session reads the same bytes and never writes them."""
    tokens = list(range(100, 140))
    first = new_engine(service)
    writer = remote(first, shard)
    first.step(admit=admit(new_sequence(A, tokens)))
    compute(writer, first, A, tokens, 0)
    first.step(advance=advance(7, (A, 40, 41)))
    compute(writer, first, A, [*tokens, 7], 40)
    first.settle()
    second = new_engine(service)
    reader = remote(second, shard)
    second.step(admit=admit(new_sequence(B, [*tokens[:36], 1, 2, 3, 4])))
    ((cached, _),) = second.admitted().values()
    assert cached == 32
    compute(reader, second, B, [*tokens[:36], 1, 2, 3, 4], 32)
    second.step(commit=commit((B, 40)))
    second.step(finish=finish(B))
    first.step(finish=finish(A))
    service.check_integrity()
    writer.close()
    reader.close()


def test_the_cache_service_dies_and_a_shard_finds_the_next(tmp_path: Path) -> None:
    """Granted work goes on; the next start of the control plane gets a higher incarnation and a pool that works."""
    service = RunningService(tmp_path)
    with running(settings(tmp_path, **MODEL)) as shard:
        service.wait_ready()
        engine = WireEngine(service.control(), mode=types_pb2.SESSION_MODE_REMOTE, ttl_ms=2000)
        data = remote(engine, shard)
        tokens = list(range(20))
        engine.step(admit=admit(new_sequence(A, tokens)))
        compute(data, engine, A, tokens[:10], 0)
        incarnation = shard.state.incarnation
        service.stop()
        plan = data.plan({A: (10, 20)})
        for layer in range(2):
            query, key, value = ORACLE.rows(tokens, 10, 20, layer)
            assert_attention(
                data.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value),
                ORACLE.attention(tokens, 10, 20, layer),
            )
        again = RunningService(tmp_path)
        again.wait_ready()
        assert shard.state.incarnation > incarnation
        with pytest.raises(KvplaneError):
            data.plan({A: (1, 20)})
        data.close()
        fresh = new_engine(again)
        data = remote(fresh, shard)
        fresh.step(admit=admit(new_sequence(A, tokens)))
        compute(data, fresh, A, tokens, 0)
        data.close()
        again.stop()


def test_a_session_that_ends_is_fenced_on_the_shard(service: RunningService, shard: ComputeServer) -> None:
    """Closed at the control plane, refused at the shard; its blocks are back."""
    engine = new_engine(service)
    data = remote(engine, shard)
    engine.step(admit=admit(new_sequence(A, [1, 2, 3])))
    compute(data, engine, A, [1, 2, 3], 0)
    pool = service.server.plane.pools["default"]
    engine.stream.close()
    engine.control.close_session(
        cache_pb2.CloseSessionRequest(session_id=engine.session_id, lease_epoch=engine.opened.lease_epoch)
    )

    def refused() -> bool:
        try:
            data.close_plan(data.plan({A: (1, 4)}))
        except KvplaneError as error:
            return error.reason == "SESSION_EXPIRED"
        return False

    # The control plane does not wait for the shards before it answers.
    wait_until(refused, "the shard refuses the session")
    wait_until(lambda: service.on_loop(lambda: pool.stats().held_blocks) == 0, "the blocks are back")
    data.close()
