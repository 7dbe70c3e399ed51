"""The life of a pool under what happens to its shards: each of these was a bug once, or is one elsewhere."""

from collections.abc import Callable

import pytest

from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire import errors
from service_rig import RunningService, wait_until
from tensorless_shard import TensorlessShard, model_message
from wire_engine import A, WireEngine, admit, commit, ids, new_sequence

MakeService = Callable[..., tuple[RunningService, list[TensorlessShard]]]


def state_of(running: RunningService) -> int:
    """State of the pool."""
    return int(running.server.plane.pools["default"].state)


def generations(engine: WireEngine) -> set[int]:
    """Generations of the last result's table entries."""
    return {each for delta in engine.result.table_deltas for each in ids(delta.blocks.generations)}


def test_registering_again_is_no_loss(service: MakeService) -> None:
    """The same boot, under the same control plane: sessions and blocks stay."""
    running, (shard,) = service()
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    shard.cut()
    shard.register()
    shard.connect()
    wait_until(lambda: state_of(running) == types_pb2.POOL_STATE_READY, "the pool goes on")
    engine.step(commit=commit((A, 40)))
    engine.settle()
    assert running.server.plane.pools["default"].pool_epoch == 1
    assert shard.sealed_blocks() == [1, 2]


def test_a_new_epoch_hands_out_no_old_generation(service: MakeService) -> None:
    """protocol.md: a surviving shard's late writer must not meet an equal (block, generation)."""
    running, (lost, _) = service(num_shards=2)
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    before = generations(engine)
    lost.restart()
    wait_until(lambda: running.server.plane.pools["default"].pool_epoch == 2, "a new epoch")
    running.wait_ready()
    fresh = WireEngine(running.control())
    fresh.step(admit=admit(new_sequence(A, range(40))))
    assert min(generations(fresh)) > max(before)


def test_a_pool_is_not_open_while_a_shard_is_away(service: MakeService) -> None:
    """I11, also when the stream broke while the pool was being created."""
    running, _ = service(num_shards=0)
    first, second = (TensorlessShard(running.address, rank=rank, world_size=2) for rank in range(2))
    second.hold_acks()
    first.start()
    second.start()
    wait_until(lambda: first.view is not None and second.view is not None, "both have created")
    pool = running.server.plane.pools["default"]
    wait_until(lambda: pool.links[0].unanswered == 0 < pool.links[1].unanswered, "one has answered")
    first.cut()
    wait_until(lambda: not pool.complete, "the loss is seen")
    second.release_acks()
    wait_until(lambda: pool.core is not None, "the pool exists")
    assert state_of(running) == types_pb2.POOL_STATE_RECONCILING
    first.connect()
    running.wait_ready()
    first.stop()
    second.stop()


def test_a_shard_lost_while_creating_is_replaced(service: MakeService) -> None:
    """The pool opens with the replacement; nobody waits for the dead one's acknowledgement."""
    running, _ = service(num_shards=0, shard_ttl_seconds=1)
    dead = TensorlessShard(running.address)
    dead.hold_acks()
    dead.start()
    wait_until(lambda: dead.view is not None, "it has created")
    dead.cut()
    wait_until(lambda: not running.server.plane.pools["default"].links, "it is lost", 5)
    replacement = TensorlessShard(running.address).start()
    running.wait_ready()
    WireEngine(running.control())
    replacement.stop()


def test_a_pool_that_could_not_be_created_is_tried_again(service: MakeService) -> None:
    """A shard without memory today may have some tomorrow."""
    running, _ = service(num_shards=0)
    shard = TensorlessShard(running.address)
    shard.fails = {"create_pool"}
    shard.start()
    wait_until(lambda: bool(shard._acks), "it has refused")  # noqa: SLF001 - the rig's own state
    shard.fails = set()
    running.wait_ready()
    shard.stop()


def test_a_silent_shard_is_lost_though_connected(service: MakeService) -> None:
    """Otherwise seals and fences would wait for ever (I8)."""
    running, (shard,) = service(shard_ttl_seconds=1)
    engine = WireEngine(running.control())
    shard.heartbeat_seconds = None
    wait_until(lambda: not running.server.plane.pools["default"].sessions, "the pool is lost", 5)
    with pytest.raises(errors.PoolLostError):
        engine.control.heartbeat(cache_pb2.HeartbeatRequest(session_id=engine.session_id, lease_epoch=1))
    assert shard.error is None or shard.error.reason == "SHARD_LOST"


def test_a_new_deployment_may_bring_another_model(service: MakeService) -> None:
    """Once all shards of a pool are gone, its name is free."""
    running, (old,) = service(shard_ttl_seconds=1)
    old.cut()
    wait_until(lambda: running.server.plane.pools["default"].abandoned, "all shards are gone", 5)
    new = TensorlessShard(running.address, model=model_message(weights="w2")).start()
    running.wait_ready()
    pool = running.control().get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool
    assert pool.model.weights_revision == "w2"
    new.stop()


def test_what_a_shard_could_not_do_is_not_reported_as_done(service: MakeService) -> None:
    """A namespace that is not stored, a session that is not served: refused, and gone."""
    running, (shard,) = service()
    engine = WireEngine(running.control())
    shard.fails = {"put_namespaces"}
    request = cache_pb2.RegisterNamespaceRequest(
        session_id=engine.session_id, lease_epoch=1, namespace=cache_pb2.NamespaceSpec(adapter_id="x")
    )
    with pytest.raises(errors.UnavailableError, match="put_namespaces failed"):
        running.control().register_namespace(request)
    shard.fails = {"serve_session"}
    with pytest.raises(errors.UnavailableError, match="serve_session failed"):
        WireEngine(running.control())
    shard.fails = set()
    assert list(running.server.plane.pools["default"].sessions) == [engine.session_id]


def test_a_fence_is_tried_until_it_is_up(service: MakeService) -> None:
    """A shard that fails to fence does not keep the blocks for ever."""
    running, (shard,) = service()
    engine = WireEngine(running.control(), mode=types_pb2.SESSION_MODE_REMOTE)
    engine.step(admit=admit(new_sequence(A, range(40))))
    shard.fails = {"fence_session"}
    running.control().close_session(cache_pb2.CloseSessionRequest(session_id=engine.session_id, lease_epoch=1))
    pool = running.server.plane.pools["default"]
    assert engine.session_id in pool.sessions
    shard.fails = set()
    wait_until(lambda: not pool.sessions, "the session is over", 5)


def test_damaged_blocks_are_never_hit_again(service: MakeService) -> None:
    """I2: a shard that reports damage ends every hit on what was published; the shards store the new version."""
    running, (shard,) = service()
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    shard.damaged([1])
    assert shard.view is not None
    rows = shard.view.namespaces
    wait_until(lambda: int(rows["version"].max()) == 1, "the new version is stored")
    other = WireEngine(running.control())
    other.step(admit=admit(new_sequence(A, range(40))))
    assert other.admitted()[A][0] == 0


def test_an_expired_engine_can_still_say_that_it_is_done(service: MakeService) -> None:
    """Section 8: deferred until its own acknowledgement; closing a session of a lost pool succeeds too."""
    running, (shard,) = service()
    engine = WireEngine(running.control(), ttl_ms=2000)
    shard.attached(engine.session_id, pid=5)
    engine.step(admit=admit(new_sequence(A, range(40))))
    control, request = running.control(), cache_pb2.CloseSessionRequest(
        session_id=engine.session_id, lease_epoch=1, drained=True
    )  # fmt: skip
    wait_until(lambda: engine.session_id in shard.fenced, "the lease is over", 5)
    assert control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool.stats.quarantined_blocks == 3
    control.close_session(request)
    assert control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool.stats.free_blocks == 63
    other = WireEngine(control)
    shard.restart()
    running.wait_ready()
    control.close_session(cache_pb2.CloseSessionRequest(session_id=other.session_id, lease_epoch=1))


def test_a_drained_session_is_over_when_every_shard_says_so(service: MakeService) -> None:
    """I9: gone = every shard; and a drain under an older lease acknowledges nothing."""
    running, shards = service(num_shards=2)
    engine = WireEngine(running.control(), ttl_ms=2000)
    for shard in shards:
        shard.attached(engine.session_id, pid=9)
    engine.step(admit=admit(new_sequence(A, range(40))))
    for shard in shards:
        wait_until(lambda shard=shard: engine.session_id in shard.fenced, "the lease is over", 5)  # type: ignore[misc]
    pool = running.server.plane.pools["default"]
    shards[0].drained(engine.session_id, lease_epoch=1)
    shards[1].drained(engine.session_id, lease_epoch=0)
    wait_until(lambda: pool.sessions[engine.session_id].drained_ranks == {0}, "one counts")
    shards[1].drained(engine.session_id, lease_epoch=1)
    wait_until(lambda: not pool.sessions, "it is over")
