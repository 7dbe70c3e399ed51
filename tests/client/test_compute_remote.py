"""Remote compute access over what goes wrong: refusals, broken streams, shards elsewhere, tensors that do not fit."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compute_access import Engine, Rig, rig
from cut_proxy import CutProxy
from kvplane.cache.service.endings import end_session
from kvplane.client import Session
from kvplane.client.compute import RemoteCompute, open_compute
from kvplane.wire.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    KvplaneError,
    LimitExceededError,
    NotGrantedError,
    PreconditionError,
    SessionExpiredError,
    SupersededError,
    UnavailableError,
    UnsupportedFeatureError,
)
from service_rig import wait_until

TOKENS = list(range(10))


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Rig, CutProxy]]:
    """Two shards; engines reach the second one by a proxy."""
    proxy = CutProxy(f"unix:{tmp_path / 'compute-1.sock'}")

    def change(rank: int) -> dict[str, object]:
        return {"tensor_parallel": 2, "advertise": proxy.address if rank else ""}

    with rig(tmp_path, 2, change=change) as made:
        yield made, proxy
    proxy.close()


def test_refusals_are_typed_and_the_session_goes_on(pool: Rig) -> None:
    """What the client can see it refuses itself, what a shard sees comes from the shard; neither ends the stream."""
    engine, oracle = pool.engine("remote shm"), pool.oracle
    sequence = engine.admit(TOKENS)
    compute = engine.compute
    with pytest.raises(InvalidArgumentError):
        compute.plan([sequence], [1], [99], num_query_heads=8)
    with pytest.raises(NotGrantedError):
        compute.plan([sequence + 1], [1], [1], num_query_heads=8)
    with pytest.raises(InvalidArgumentError, match="filled") as refused:
        compute.plan([sequence], [1], [9], num_query_heads=8)
    assert refused.value.metadata["shard"] == "0"
    with pytest.raises(UnsupportedFeatureError, match="window"):
        compute.plan([sequence], [10], [10], num_query_heads=8, window=3)
    with pytest.raises(UnsupportedFeatureError, match="window"):
        compute.plan([sequence], [10], [10], num_query_heads=8, windows={1: 3})
    query, key, value = oracle.rows(TOKENS, 0, 10, 0)
    with compute.plan([sequence], [10], [10], num_query_heads=8) as plan:
        with pytest.raises(InvalidArgumentError):
            plan.run(9, query, key, value)
        with pytest.raises(InvalidArgumentError):
            plan.run(0, query, key[:, :1], value)
        with pytest.raises(InvalidArgumentError):
            plan.run(0, query, key, value.to(torch.bfloat16))
        with pytest.raises(InvalidArgumentError):
            plan.run(0, query.double(), key, value)
        with pytest.raises(InvalidArgumentError, match="filled"):
            plan.attend(1, query)
    with pytest.raises(PreconditionError, match="closed"):
        plan.run(0, query, key, value)
    assert engine.session.state.work.open_plans == 0
    engine.forward(sequence)
    engine.written[sequence] = 8
    with pytest.raises(InvalidArgumentError, match="slot"):
        engine.forward(sequence)
    engine.finish(sequence)
    engine.close()


def test_grants_pile_up_without_plans(pool: Rig) -> None:
    """Many steps between two plans: more grants than go with one, applied in order before it."""
    engine = pool.engine("remote inline")
    for index in range(70):
        engine.finish(engine.admit([index, 1, 2]))
    sequence = engine.admit(TOKENS)
    engine.forward(sequence)
    assert isinstance(engine.compute, RemoteCompute)
    assert [link.waiting_grants for link in engine.compute.links] == [0, 0]
    engine.finish(sequence)
    engine.close()


def test_a_second_compute_access_takes_over(pool: Rig) -> None:
    """The shards have the tables; grants that wait are passed on when the first is closed."""
    engine = pool.engine("remote shm")
    sequence = engine.admit(TOKENS)
    engine.forward(sequence)
    engine.advance({sequence: 44})
    engine.advance({sequence: 45})
    engine.compute.close()
    engine.compute = open_compute(engine.session, "inline")
    engine.forward(sequence)
    engine.finish(sequence)
    engine.close()


def test_a_newer_stream_supersedes(pool: Rig) -> None:
    """Two compute accesses at once: the older one is told, and comes back when it asks again."""
    engine = pool.engine("remote inline")
    sequence = engine.admit(TOKENS)
    plan = engine.compute.plan([sequence], [10], [10], num_query_heads=8)
    newer = open_compute(engine.session, "inline")
    rows = pool.oracle.rows(TOKENS, 0, 10, 0)
    with pytest.raises(SupersededError):
        plan.run(0, *rows)
    plan.close()
    newer.close()
    engine.forward(sequence)
    engine.finish(sequence)
    engine.close()


def test_the_end_of_a_session_is_told_by_the_shards(pool: Rig) -> None:
    engine = pool.engine("remote shm")
    sequence = engine.admit(TOKENS)
    plan = engine.compute.plan([sequence], [10], [10], num_query_heads=8)
    hosted = pool.service.server.plane.pools["default"]
    session = hosted.sessions[engine.session.session_id]
    pool.service.on_loop(lambda: end_session(hosted, session, SessionExpiredError("ended")))
    rows = pool.oracle.rows(TOKENS, 0, 10, 0)

    def served() -> bool:
        holdings = [server.state.holding for server in pool.servers]
        found = [holding.sessions.get(engine.session.session_id) for holding in holdings if holding is not None]
        return any(each is not None and not each.fenced for each in found)

    wait_until(lambda: not served(), "the shards have fenced the session")
    with pytest.raises(SessionExpiredError):
        plan.run(0, *rows)
    with pytest.raises(KvplaneError):
        engine.compute.plan([sequence], [10], [10], num_query_heads=8)
    engine.close()


def test_a_broken_stream_ends_its_plan_alone(proxied: tuple[Rig, CutProxy]) -> None:
    """Its runs are unavailable, its step completes once the shard has answered again; grants are repeated."""
    pool, proxy = proxied
    engine = pool.engine("remote shm")
    sequence = engine.admit(TOKENS)
    engine.forward(sequence)
    engine.advance({sequence: 70})
    step = engine.session.state.last_step
    plan = engine.compute.plan([sequence], [1], [11], num_query_heads=8)
    proxy.cut()
    rows = pool.oracle.rows(engine.tokens[sequence], 10, 11, 0)
    with pytest.raises(UnavailableError) as broken:
        plan.run(0, *rows)
    assert broken.value.metadata["shard"] == "1"
    assert broken.value.retry_after_seconds
    plan.close()
    assert engine.session.state.completed_step < step
    engine.session.run(engine.session.draft())

    def again() -> bool:
        try:
            engine.forward(sequence)
        except UnavailableError:
            return False
        return True

    wait_until(again, "the stream is back")
    assert engine.session.state.completed_step >= step
    engine.advance({sequence: 71})
    proxy.cut()
    wait_until(again, "the stream is back, with the grant that was not confirmed")
    engine.finish(sequence)


def test_an_answer_that_does_not_come_is_not_waited_for(proxied: tuple[Rig, CutProxy]) -> None:
    pool, proxy = proxied
    session = Session.open(mode="remote", address=pool.service.address, max_sequences=8)
    engine = Engine(session, open_compute(session, timeout_seconds=0.5), pool.oracle, None)
    pool.engines.append(engine)
    sequence = engine.admit(TOKENS)
    plan = engine.compute.plan([sequence], [10], [10], num_query_heads=8)
    proxy.hold()
    before = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        plan.run(0, *pool.oracle.rows(TOKENS, 0, 10, 0))
    assert 0.4 < time.monotonic() - before < 3
    proxy.release()
    plan.close()
    engine.forward(sequence)
    engine.finish(sequence)


def test_a_plan_that_is_not_answered_is_not_drained(proxied: tuple[Rig, CutProxy]) -> None:
    """One shard may still open it, and run the copies that came with it: its step completes with the next plan. A plan
    that was refused, or never sent, holds nothing up."""
    pool, proxy = proxied
    session = Session.open(mode="remote", address=pool.service.address, max_sequences=8)
    engine = Engine(session, open_compute(session, timeout_seconds=0.5), pool.oracle, None)
    pool.engines.append(engine)
    sequence = engine.admit(TOKENS)
    step = session.state.last_step
    for lengths in (([20], [20]), ([1], [10])):
        with pytest.raises(InvalidArgumentError):
            engine.compute.plan([sequence], *lengths, num_query_heads=8)
        assert session.state.completed_step == step
    session.run(session.draft())
    step = session.state.last_step
    proxy.hold()
    with pytest.raises(DeadlineExceededError):
        engine.compute.plan([sequence], [10], [10], num_query_heads=8)
    assert session.state.completed_step < step
    proxy.release()
    engine.forward(sequence)
    assert session.state.completed_step >= step
    engine.finish(sequence)


def test_large_tensors_get_a_larger_arena(tmp_path: Path) -> None:
    """More than the first arena holds; more than all arenas may hold is refused with the limit named."""
    with rig(tmp_path, change=lambda _: {"arena_bytes": 6 << 20, "max_blocks": 8192}) as pool:
        engine = pool.engine("remote shm")
        sequence = engine.admit([token % 1000 for token in range(1900)])
        query, key, value = torch.randn(1900, 8, 16), torch.randn(1900, 2, 16), torch.randn(1900, 2, 16)
        with engine.compute.plan([sequence], [600], [600], num_query_heads=8) as plan:
            outs = [plan.run(layer, query[:600], key[:600], value[:600]) for layer in range(pool.oracle.num_layers)]
        q, k, v = (each[:600].double().transpose(0, 1) for each in (query, key, value))
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for out in outs:
            torch.testing.assert_close(out.double(), exact.transpose(0, 1), rtol=2e-5, atol=2e-5)
        plan = engine.compute.plan([sequence], [1300], [1900], num_query_heads=8)
        with pytest.raises(LimitExceededError) as full:
            plan.run(0, query[600:], key[600:], value[600:])
        plan.close()
        assert full.value.metadata["limit"] == "arena_bytes"
        engine.finish(sequence)


def test_auto_falls_back_where_no_memory_can_be_shared(tmp_path: Path) -> None:
    """The attribute says so; asked for shared memory and nothing else, it is an error."""
    with rig(tmp_path, change=lambda _: {"arena_bytes": 1000}) as pool:
        session = Session.open(mode="remote", address=pool.service.address, max_sequences=8)
        with pytest.raises(LimitExceededError, match="arena"):
            open_compute(session, "shm")
        compute = open_compute(session)
        assert isinstance(compute, RemoteCompute)
        assert compute.transport == "inline"
        engine = Engine(session, compute, pool.oracle, None)
        pool.engines.append(engine)
        sequence = engine.admit(TOKENS)
        engine.forward(sequence)
        engine.finish(sequence)
        attached = pool.engine()
        with pytest.raises(InvalidArgumentError, match="transport"):
            open_compute(attached.session, "inline")
