"""One suite on the service over gRPC and on its in-process twin: the same answers, checked by the oracle."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire import errors
from oracle import Oracle
from tensorless_shard import model_message
from wire_engine import (
    BLOCK,
    A,
    B,
    C,
    Rejected,
    WireEngine,
    admit,
    advance,
    commit,
    finish,
    ids,
    new_sequence,
    numbers,
    sequence_id,
    u32,
    u64,
)

MakeRig = Callable[..., Any]


def test_a_second_prompt_hits_after_the_seal_and_never_before(rig: MakeRig) -> None:
    """I3 on the wire: hit reasons say pending, then how much; the answer carries tables with generations."""
    made = rig()
    oracle = Oracle(64, BLOCK)
    engine = WireEngine(made.control, oracle, made.row)
    engine.step(admit=admit(new_sequence(A, range(40))))
    assert engine.admitted() == {A: (0, "NEVER_SEEN")}
    (delta,) = engine.result.table_deltas
    assert (numbers(delta.starts), numbers(delta.counts)) == ([0], [3])
    engine.step(admit=admit(new_sequence(B, range(40))))
    assert engine.states()[B] == ("WAITING", "PREFIX_PENDING")
    engine.step(commit=commit((A, 40)))
    engine.settle()
    engine.step(admit=admit(again=[B]))
    assert engine.admitted() == {B: (32, "FULL")}
    engine.step(finish=finish(A, B))
    engine.settle()
    made.check_integrity()
    assert engine.result.stats.cached_blocks == 2
    assert engine.result.stats.hit_tokens == 32


def test_lookup_tells_and_protects_nothing(rig: MakeRig) -> None:
    """Hits, caps, short prompts, other namespaces."""
    made = rig()
    engine = WireEngine(made.control)
    engine.step(admit=admit(new_sequence(A, range(40))))
    engine.step(commit=commit((A, 40)))
    engine.settle()

    def lookup(tokens: range, namespace: int = 0, **options: Any) -> tuple[int, str]:
        response = made.control.lookup(
            cache_pb2.LookupRequest(
                session_id=engine.session_id,
                lease_epoch=1,
                prompt=types_pb2.Prompt(tokens=u32(tokens), namespace_id=namespace),
                **options,
            )
        )
        assert numbers(response.group_hit_tokens) == [response.hit_tokens]
        return response.hit_tokens, types_pb2.HitReason.Name(response.hit_reason).removeprefix("HIT_REASON_")

    assert lookup(range(40)) == (32, "FULL")
    assert lookup(range(32)) == (16, "FULL")
    assert lookup(range(16)) == (0, "TOO_SHORT")
    assert lookup(range(40), max_hit_tokens=20) == (16, "FULL")
    assert lookup(range(1, 41)) == (0, "NEVER_SEEN")
    registered = made.control.register_namespace(
        cache_pb2.RegisterNamespaceRequest(
            session_id=engine.session_id, lease_epoch=1, namespace=cache_pb2.NamespaceSpec(adapter_id="legal")
        )
    )
    assert len(registered.root_digest) == 32
    assert lookup(range(40), registered.namespace_id) == (0, "NEVER_SEEN")
    with pytest.raises(errors.NotFoundError):
        lookup(range(40), 99)


def test_content_and_adapters_separate_prefixes(rig: MakeRig) -> None:
    """The same tokens over another image, or another adapter, do not hit."""
    made = rig()
    engine = WireEngine(made.control)
    image = types_pb2.ContentSpan(kind=0x20, content=b"a" * 32, first_token=20, num_tokens=10)
    other = types_pb2.ContentSpan(kind=0x20, content=b"b" * 32, first_token=20, num_tokens=10)
    adapter = types_pb2.AdapterSpan(adapter_id="legal", first_token=20, num_tokens=10)
    engine.step(admit=admit(new_sequence(A, range(40), content=[image])))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    cases: list[tuple[dict[str, Any], int]] = [
        ({"content": [image]}, 32),
        ({"content": [other]}, 16),
        ({}, 16),
        ({"adapters": [adapter]}, 16),
    ]
    for row, (options, hit) in enumerate(cases, start=1):
        engine.step(admit=admit(new_sequence(sequence_id(row), range(40), **options)))
        assert engine.admitted()[sequence_id(row)][0] == hit


def test_steps_count_once(rig: MakeRig) -> None:
    """I7: a repeated id gets the stored response, a wrong one is out of order, a fifth unread answer is refused."""
    made = rig()
    engine = WireEngine(made.control)
    first = engine.request(admit=admit(new_sequence(A, range(40))))
    engine.send(first)
    engine.send(first)
    answers = [engine.stream.receive(), engine.stream.receive()]
    assert answers[0] == answers[1]
    engine.send(engine.request(step_id=3))
    with pytest.raises(Rejected) as refused:
        engine.receive()
    assert type(refused.value.error) is errors.StepOutOfOrderError
    engine.seen = 0
    for _ in range(3):
        engine.send(engine.request(completed=0))
        engine.stream.receive()
    engine.send(engine.request(completed=0))
    with pytest.raises(Rejected) as refused:
        engine.receive()
    assert refused.value.error.metadata["limit"] == "unanswered_steps"


def test_stored_answers_are_bounded(rig: MakeRig) -> None:
    """I7: what the engine has confirmed is dropped, rejected steps included; id 0 is never a step."""
    made = rig()
    engine = WireEngine(made.control)
    for _ in range(20):
        with pytest.raises(Rejected):
            engine.step(finish=finish(B))
    engine.send(engine.request(step_id=0))
    with pytest.raises(Rejected):
        engine.receive()
    engine.seen = engine.step_id
    engine.step()


def test_forks_share_blocks_and_copy_the_tail(rig: MakeRig) -> None:
    """I5: full blocks by reference, the partial tail by an ordered copy, pinned until its acknowledgement."""
    made = rig()
    oracle = Oracle(64, BLOCK)
    engine = WireEngine(made.control, oracle, made.row)
    engine.step(admit=admit(new_sequence(A, range(40))))
    engine.step(commit=commit((A, 40)), forks=[step_pb2.Fork(parent_sequence_id=A, child_sequence_ids=u64([B, C]))])
    copies = list(engine.result.transfers)
    assert [numbers(each.slots) for each in copies] == [[8], [8]]
    assert {each.kind for each in copies} == {types_pb2.TRANSFER_KIND_COPY}
    engine.settle()
    engine.step(acks=[types_pb2.Ack(op_id=each.op_id) for each in copies])
    engine.step(advance=advance(7, (A, 40, 42), (B, 40, 42), (C, 40, 42)))
    engine.step(finish=finish(B, C, A))
    engine.settle()
    made.check_integrity()
    assert engine.result.stats.held_blocks == 0


def test_sessions_are_opened_for_the_pool_they_name(rig: MakeRig) -> None:
    """Identity, features, limits, modes: each refused as what it is."""
    made = rig()
    good: dict[str, Any] = {"pool_id": "default", "model": model_message(), "mode": types_pb2.SESSION_MODE_ATTACHED}
    cases: list[tuple[dict[str, Any], type[errors.KvplaneError]]] = [
        ({"pool_id": "other"}, errors.NotFoundError),
        ({"model": model_message(weights="w2")}, errors.IdentityMismatchError),
        ({"mode": 0}, errors.InvalidArgumentError),
        ({"ttl_ms": 1}, errors.InvalidArgumentError),
        ({"required_features": ["time_travel"]}, errors.UnsupportedFeatureError),
        ({"resume_token": b"x"}, errors.SessionExpiredError),
        ({"engine_name": "n" * 300}, errors.InvalidArgumentError),
    ]
    for changes, kind in cases:
        with pytest.raises(errors.KvplaneError) as refused:
            made.control.open_session(cache_pb2.OpenSessionRequest(**(good | changes)))
        assert type(refused.value) is kind, changes
    other: dict[str, Any] = good | {"model": model_message(weights="w2")}
    with pytest.raises(errors.IdentityMismatchError) as mismatch:
        made.control.open_session(cache_pb2.OpenSessionRequest(**other))
    assert mismatch.value.metadata == {"field": "model.weights_revision", "pool": "w1", "caller": "w2"}


def test_pools_are_listed_in_pages(rig: MakeRig) -> None:
    """One pool, described; a page token leads on."""
    made = rig()
    (pool,) = made.control.list_pools(cache_pb2.ListPoolsRequest()).pools
    assert pool == made.control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool
    assert (pool.state, pool.num_blocks, pool.stats.free_blocks) == (types_pb2.POOL_STATE_READY, 64, 63)
    assert not made.control.list_pools(cache_pb2.ListPoolsRequest(page_token="default")).pools
    with pytest.raises(errors.InvalidArgumentError):
        made.control.list_pools(cache_pb2.ListPoolsRequest(page_size=1001))


def test_a_session_resumes_with_its_token(rig: MakeRig) -> None:
    """A new lease epoch, the same sequences; the old epoch and the old stream are over; lost answers come again."""
    made = rig()
    engine = WireEngine(made.control)
    engine.step(admit=admit(new_sequence(A, range(40))))
    engine.send(engine.request(commit=commit((A, 40))))
    lost = engine.stream.receive()
    engine.opened = made.control.open_session(
        cache_pb2.OpenSessionRequest(pool_id="default", resume_token=engine.opened.resume_token)
    )
    assert (engine.opened.lease_epoch, engine.opened.last_applied_step) == (2, 2)
    with pytest.raises(errors.StaleEpochError):
        engine.step()
    engine.step_id -= 1
    with pytest.raises(errors.StaleEpochError):
        made.control.heartbeat(cache_pb2.HeartbeatRequest(session_id=engine.session_id, lease_epoch=1))
    assert engine.open_stream().last_applied_step == 2
    again = engine.stream.receive()
    assert again.result == lost.result
    engine.seen = 2
    engine.step(finish=finish(A))


def test_closing_gives_everything_back(rig: MakeRig) -> None:
    """Blocks return, published prefixes stay for the next engine, a closed session is gone."""
    made = rig()
    first = WireEngine(made.control)
    first.step(admit=admit(new_sequence(A, range(40))))
    first.step(commit=commit((A, 40)))
    first.settle()
    request = cache_pb2.CloseSessionRequest(session_id=first.session_id, lease_epoch=1, drained=True)
    made.control.close_session(request)
    made.control.close_session(request)
    with pytest.raises(errors.SessionExpiredError):
        made.control.heartbeat(cache_pb2.HeartbeatRequest(session_id=first.session_id, lease_epoch=1))
    second = WireEngine(made.control)
    second.step(admit=admit(new_sequence(A, range(40))))
    assert second.admitted() == {A: (32, "FULL")}
    made.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_a_random_engine_agrees_with_the_oracle(rig: MakeRig, seed: int) -> None:
    """Shared prefixes, decode, forks, finishes and preemptions in a pool that is too small."""
    made = rig(num_blocks=40)
    chance = random.Random(seed)
    oracle = Oracle(40, BLOCK)
    engine = WireEngine(made.control, oracle, made.row)
    tokens = [[prefix * 1000 + at for at in range(200)] for prefix in range(3)]
    running: dict[int, list[int]] = {}  # sequence -> [known, committed]
    waiting: set[int] = set()
    serial = 0
    for _ in range(60):
        operations: dict[str, Any] = {}
        if running and chance.random() < 0.75:
            rows = [(each, length[0], length[0] + 2) for each, length in running.items()]
            operations["advance"] = advance(chance.randrange(5), *rows)
        elif running:
            gone = chance.choice(sorted(running))
            del running[gone]
            operations["finish"] = finish(gone)
        if chance.random() < 0.5:
            serial += 1
            prompt = chance.choice(tokens)[: chance.randrange(1, 120)] + [serial] * chance.randrange(3)
            operations["admit"] = admit(new_sequence(sequence_id(serial, serial), prompt), again=sorted(waiting))
            waiting.add(sequence_id(serial, serial))
        elif waiting:
            operations["admit"] = admit(again=sorted(waiting))
        engine.step(**operations)
        for sequence in ids(operations["advance"].sequence_ids) if "advance" in operations else ():
            running[sequence][0] += 1
        for sequence, (state, _) in engine.states().items():
            if state == "PREEMPTED":
                running.pop(sequence, None)
                waiting.add(sequence)
        for sequence in ids(engine.result.admitted.sequence_ids):
            waiting.discard(sequence)
            known = len(oracle.sequences[engine.session_id, sequence].tokens)
            running[sequence] = [known, 0]
        engine.settle()
        counts = oracle.counts()
        stats = engine.result.stats
        assert (stats.free_blocks, stats.cached_blocks, stats.held_blocks, stats.quarantined_blocks) == tuple(
            counts[state] for state in ("free", "cached", "held", "quarantined")
        )
    made.check_integrity()
    assert engine.result.stats.hit_tokens > 0
