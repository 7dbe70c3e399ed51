"""Remote mode: what is granted executes, what is not is refused and executes nothing (I2)."""

import time

import grpc
import pytest
import torch

from compute_control import EngineSession, block_list
from compute_engine import ATTEND, WRITE, WRITE_AND_ATTEND, RemoteEngine, read_request, run_of
from compute_harness import BLOCK_TOKENS, ORACLE, Setup, step
from compute_oracle import assert_attention
from kvplane.v1 import compute_pb2, step_pb2, types_pb2
from kvplane.wire.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    LimitExceededError,
    NotGrantedError,
    SessionExpiredError,
    StaleEpochError,
    StaleGenerationError,
    UnauthenticatedError,
    UnsupportedFeatureError,
)
from kvplane.wire.packed import pack_u32, pack_u64
from kvplane.wire.status import from_rpc_error


def plan_often(engine: RemoteEngine, times: int) -> None:
    for _ in range(times):
        engine.plan({0: (1, 1)})


def test_prefill_then_decode(setup: Setup) -> None:
    """Outputs are those of dense attention over all tokens so far, layer by layer."""
    engine, tokens = setup.engine(), [5, 6, 7, 8, 9, 10]
    blocks = setup.blocks(3)
    for layer, out in enumerate(step(engine, 0, tokens, 0, setup.control.grant(engine.session, {0: (0, blocks[:2])}))):
        assert_attention(out, ORACLE.attention(tokens, 0, 6, layer))
    for token in (11, 12, 13):
        tokens.append(token)
        grants = [setup.control.grant(engine.session, {0: (2, blocks[2:])})] if len(tokens) == 9 else []
        for layer, out in enumerate(step(engine, 0, tokens, len(tokens) - 1, *grants)):
            assert_attention(out, ORACLE.attention(tokens, len(tokens) - 1, len(tokens), layer))


def test_two_sessions_share_a_sealed_prefix(setup: Setup) -> None:
    """A block of another session is readable once it is sealed, and not before."""
    writer, reader = setup.engine(), setup.engine()
    shared, own = setup.blocks(1), setup.blocks(2)
    prefix = [1, 2, 3, 4]
    step(writer, 0, prefix, 0, setup.control.grant(writer.session, {0: (0, shared)}))
    grant = setup.control.grant(reader.session, {7: (0, [*shared, own[0]])})
    with pytest.raises(NotGrantedError) as refused:
        step(reader, 7, [*prefix, 20, 21], 4, grant)
    assert refused.value.metadata["block_id"] == str(shared[0][0])
    assert setup.control.seal(shared) == [True]
    for layer, out in enumerate(step(reader, 7, [*prefix, 20, 21], 4, grant)):
        assert_attention(out, ORACLE.attention([*prefix, 20, 21], 4, 6, layer))


def test_a_sealed_block_refuses_writes(setup: Setup) -> None:
    engine, blocks = setup.engine(), setup.blocks(1)
    step(engine, 0, [1, 2, 3, 4], 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    assert setup.control.seal(blocks) == [True]
    before = engine.stub.ReadBlocks(read_request(engine.session, blocks))
    payload = [each.piece.payload for each in before]
    with pytest.raises(InvalidArgumentError, match="sealed"):
        step(engine, 0, [9, 9, 9, 9], 0)
    assert [each.piece.payload for each in engine.stub.ReadBlocks(read_request(engine.session, blocks))] == payload


def test_slots_below_filled_refuse_writes(setup: Setup) -> None:
    """Commit freezes: only a truncation lowers the fill level."""
    engine, blocks = setup.engine(), setup.blocks(1)
    tokens = [1, 2, 3]
    step(engine, 0, tokens, 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    with pytest.raises(InvalidArgumentError, match=f"block {blocks[0][0]}"):
        step(engine, 0, [1, 8, 8], 1)

    def cut(body: step_pb2.GrantBody) -> None:
        body.truncated_sequence_ids, body.truncated_tokens = pack_u64([0]), pack_u32([1])

    for layer, out in enumerate(step(engine, 0, [1, 8, 8], 1, setup.control.grant(engine.session, change=cut))):
        assert_attention(out, ORACLE.attention([1, 8, 8], 1, 3, layer))


def test_unfilled_slots_are_not_read(setup: Setup) -> None:
    engine, blocks = setup.engine(), setup.blocks(2)
    with pytest.raises(InvalidArgumentError, match="filled") as refused:
        step(engine, 0, [1, 2, 3, 4, 5], 4, setup.control.grant(engine.session, {0: (0, blocks)}))
    assert refused.value.metadata["block_id"] == str(blocks[0][0])


def test_a_layer_reads_what_it_wrote_in_the_same_plan(setup: Setup) -> None:
    """Write and attend apart, in two runs; a layer that was not written does not answer."""
    engine, tokens = setup.engine(), [1, 2, 3, 4, 5]
    grant = setup.control.grant(engine.session, {0: (0, setup.blocks(2))})
    plan = engine.plan({0: (5, 5)}, grant)
    query, key, value = ORACLE.rows(tokens, 0, 5, 1)
    engine.run(plan, 1, WRITE, key=key, value=value)
    assert_attention(engine.run(plan, 1, ATTEND, query=query), ORACLE.attention(tokens, 0, 5, 1))
    with pytest.raises(InvalidArgumentError, match="filled"):
        engine.run(plan, 0, ATTEND, query=query)
    engine.close_plan(plan)
    with pytest.raises(InvalidArgumentError, match="filled"):
        engine.plan({0: (0, 5)})


def test_a_newer_occupant_makes_the_old_one_stale(setup: Setup) -> None:
    """After the first write under a new generation every use of the old one is refused."""
    old, new = setup.engine(), setup.engine()
    blocks = setup.blocks(1)
    step(old, 0, [1, 2, 3], 0, setup.control.grant(old.session, {0: (0, blocks)}))
    again = setup.control.new_blocks([blocks[0][0]])
    step(new, 0, [4, 5], 0, setup.control.grant(new.session, {0: (0, again)}))
    with pytest.raises(StaleGenerationError) as refused:
        step(old, 0, [1, 2, 3, 4], 3)
    assert refused.value.metadata["generation"] == str(blocks[0][1])
    with pytest.raises(grpc.RpcError) as unread:
        list(old.stub.ReadBlocks(read_request(old.session, blocks)))
    assert from_rpc_error(unread.value).reason == "STALE_GENERATION"


def test_an_open_plan_keeps_its_blocks(setup: Setup) -> None:
    """A block of an open plan gets no new occupant of another session until the plan closes."""
    first, second = setup.engine(), setup.engine()
    blocks = setup.blocks(1)
    step(first, 0, [1, 2, 3, 4], 0, setup.control.grant(first.session, {0: (0, blocks)}))
    plan = first.plan({0: (0, 4)})
    again = setup.control.new_blocks([blocks[0][0]])
    grant = setup.control.grant(second.session, {0: (0, again)})
    with pytest.raises(Exception, match="open plan") as refused:
        step(second, 0, [7, 7], 0, grant)
    assert getattr(refused.value, "retry_after_seconds", None)
    first.close_plan(plan)
    second.close_plan(1)
    step(second, 0, [7, 7], 0)


def test_grants_are_verified_and_in_order(setup: Setup) -> None:
    engine, control = setup.engine(), setup.control
    blocks = setup.blocks(4)
    grants = [control.grant(engine.session, {index: (0, [block])}) for index, block in enumerate(blocks)]
    with pytest.raises(NotGrantedError, match="missing"):
        engine.apply(grants[1])
    assert engine.apply(grants[0], grants[1]) == 2
    assert engine.apply(grants[0], grants[1]) == 2
    forged = step_pb2.Grant(body=grants[2].body, mac=bytes(32))
    with pytest.raises(NotGrantedError, match="signed"):
        engine.apply(forged)
    flipped = step_pb2.Grant(body=grants[2].body[:-1] + bytes([grants[2].body[-1] ^ 1]), mac=grants[2].mac)
    with pytest.raises(NotGrantedError, match="signed"):
        engine.apply(flipped)
    assert engine.apply(grants[2], grants[3]) == 4


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("pool_id", "other", NotGrantedError),
        ("session_id", 999, NotGrantedError),
        ("pool_epoch", 77, StaleEpochError),
        ("incarnation", 0, StaleEpochError),
        ("boot_ids", pack_u64([1]), StaleEpochError),
        ("lease_epoch", 9, StaleEpochError),
        ("required_features", ["teleport"], UnsupportedFeatureError),
        ("fork_parents", pack_u64([1]), InvalidArgumentError),
        ("truncated_sequence_ids", pack_u64([1]), InvalidArgumentError),
        ("boot_ids", b"x", InvalidArgumentError),
    ],
)
def test_a_wrong_grant_changes_nothing(setup: Setup, field: str, value: object, error: type[Exception]) -> None:
    """Signed, and still wrong: refused whole, and the next right one applies with its number."""
    engine, blocks = setup.engine(), setup.blocks(1)

    def change(body: step_pb2.GrantBody) -> None:
        if field == "required_features":
            body.required_features.append("teleport")
        else:
            setattr(body, field, value)

    with pytest.raises(error):
        engine.apply(setup.control.grant(engine.session, {0: (0, blocks)}, change))
    with pytest.raises(NotGrantedError, match="no granted table"):
        engine.plan({0: (1, 1)})
    setup.control.reset_numbers(engine.session)
    assert engine.apply(setup.control.grant(engine.session, {0: (0, blocks)})) == 1


def test_forks_copy_the_partial_tail(setup: Setup) -> None:
    """A child shares full blocks and gets its own copy of the tail; both go on apart."""
    engine, control = setup.engine(), setup.control
    tokens, blocks, own = [1, 2, 3, 4, 5, 6], setup.blocks(2), setup.blocks(1)
    step(engine, 0, tokens, 0, control.grant(engine.session, {0: (0, blocks)}))

    def fork(body: step_pb2.GrantBody) -> None:
        body.forked_sequence_ids, body.fork_parents, body.fork_tokens = pack_u64([1]), pack_u64([0]), pack_u32([4])
        body.copies.append(
            types_pb2.Transfer(
                op_id=1,
                kind=types_pb2.TRANSFER_KIND_COPY,
                source=[block_list(blocks[1:])],
                destination=[block_list(own)],
                slots=pack_u32([2]),
            )
        )

    grant = control.grant(engine.session, {1: (1, own)}, fork)
    plan = engine.plan({0: (1, 7), 1: (1, 7)}, grant)
    parent, child = [*tokens, 50], [*tokens, 60]
    for layer in range(ORACLE.num_layers):
        rows = [ORACLE.rows(each, 6, 7, layer) for each in (parent, child)]
        query, key, value = (torch.cat([row[part] for row in rows]) for part in range(3))
        out = engine.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
        assert_attention(out[:1], ORACLE.attention(parent, 6, 7, layer))
        assert_attention(out[1:], ORACLE.attention(child, 6, 7, layer))


def test_a_zombie_is_refused(setup: Setup) -> None:
    """After its fence a session executes nothing, in streams that were open and in new ones."""
    engine, blocks = setup.engine(), setup.blocks(1)
    step(engine, 0, [1, 2], 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    plan = engine.plan({0: (1, 3)})
    setup.control.fence(engine.session)
    query, key, value = ORACLE.rows([1, 2, 3], 2, 3, 0)
    with pytest.raises(SessionExpiredError):
        engine.run(plan, 0, WRITE_AND_ATTEND, query=query, key=key, value=value)
    with pytest.raises(SessionExpiredError):
        engine.plan({0: (1, 3)})
    with pytest.raises(grpc.RpcError) as refused:
        setup.engine(engine.session)
    assert from_rpc_error(refused.value).reason == "SESSION_EXPIRED"


def test_a_resumed_session_ends_the_older_lease(setup: Setup) -> None:
    """The new lease reads what the session had written; the old one is refused."""
    engine, control = setup.engine(), setup.control
    blocks = setup.blocks(1)
    step(engine, 0, [1, 2], 0, control.grant(engine.session, {0: (0, blocks)}))
    resumed = setup.engine(control.open_session(resume=engine.session))
    with pytest.raises((StaleEpochError, grpc.RpcError)):
        engine.plan({0: (1, 3)})

    def reset(body: step_pb2.GrantBody) -> None:
        body.reset = True

    grant = control.grant(resumed.session, {0: (0, blocks)}, reset)
    for layer, out in enumerate(step(resumed, 0, [1, 2, 3], 2, grant)):
        assert_attention(out, ORACLE.attention([1, 2, 3], 2, 3, layer))


def test_the_secret_is_asked_for(setup: Setup) -> None:
    session = setup.control.open_session()
    impostor = EngineSession(session.session_id, session.lease_epoch, b"guess", session.mode)
    with pytest.raises(grpc.RpcError) as refused:
        setup.engine(impostor)
    assert from_rpc_error(refused.value).reason == UnauthenticatedError.default_reason


def test_a_newer_stream_takes_over(setup: Setup) -> None:
    first = setup.engine()
    blocks = setup.blocks(1)
    first.apply(setup.control.grant(first.session, {0: (0, blocks)}))
    second = setup.engine(first.session)
    assert second.opened.last_grant == 1
    with pytest.raises(grpc.RpcError) as ended:
        plan_often(first, 3)
    assert from_rpc_error(ended.value).reason == "SUPERSEDED"
    step(second, 0, [1], 0)


def test_shapes_and_lengths_are_checked(setup: Setup) -> None:
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    for sequences in ({0: (2, 1)}, {0: (5, 5)}):
        with pytest.raises(InvalidArgumentError):
            engine.plan(sequences)
    plan = engine.plan({0: (2, 2)})
    query, key, value = ORACLE.rows([1, 2], 0, 2, 0)
    for tensors in (
        {"query": query[:1], "key": key, "value": value},
        {"query": query, "key": key[:, :1], "value": value},
        {"query": query[:, :3], "key": key, "value": value},
        {"query": query, "key": key},
        {"query": query, "key": key, "value": value.to(torch.float16)},
    ):
        with pytest.raises(InvalidArgumentError):
            engine.run(plan, 0, WRITE_AND_ATTEND, **tensors)
    with pytest.raises(InvalidArgumentError):
        engine.run(plan, 9, WRITE_AND_ATTEND, query=query, key=key, value=value)
    with pytest.raises(InvalidArgumentError):
        engine.run(plan + 1, 0, WRITE_AND_ATTEND, query=query, key=key, value=value)
    assert_attention(
        engine.run(plan, 0, WRITE_AND_ATTEND, query=query, key=key, value=value), ORACLE.attention([1, 2], 0, 2, 0)
    )


def test_options_that_are_not_built_are_refused(setup: Setup) -> None:
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    with pytest.raises(UnsupportedFeatureError):
        engine.plan({0: (1, 1)}, options=compute_pb2.AttentionOptions(tree_mask=b"\1"))


def test_sinks_and_alibi_reach_the_kernels(setup: Setup) -> None:
    """A sink beyond all scores leaves nothing; slopes that forbid distance leave each token its own value."""
    engine, tokens = setup.engine(), [1, 2, 3]
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    plan = engine.plan({0: (3, 3)}, options=compute_pb2.AttentionOptions(sinks=[1e4, -1e4, 1e4, -1e4]))
    rows = [ORACLE.rows(tokens, 0, 3, layer) for layer in range(ORACLE.num_layers)]
    for layer, (query, key, value) in enumerate(rows):
        out = engine.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
        assert not out[:, ::2].any()
        assert_attention(out[:, 1::2], ORACLE.attention(tokens, 0, 3, layer)[:, 1::2])
    engine.close_plan(plan)
    query, _, value = rows[0]
    plan = engine.plan({0: (1, 3)}, options=compute_pb2.AttentionOptions(alibi_slopes=[1e4] * 4))
    out = engine.run(plan, 0, ATTEND, query=query[2:])
    assert_attention(out[0], value[2].repeat_interleave(2, 0).double())
    with pytest.raises(InvalidArgumentError, match="sinks"):
        engine.plan({0: (1, 3)}, options=compute_pb2.AttentionOptions(sinks=[1.0] * 3))


def test_deadlines_are_kept(setup: Setup) -> None:
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    plan = engine.plan({0: (1, 1)}, deadline_ms=50)
    query, key, value = ORACLE.rows([1], 0, 1, 0)
    time.sleep(0.08)
    with pytest.raises(DeadlineExceededError):
        engine.run(plan, 0, WRITE_AND_ATTEND, query=query, key=key, value=value)


def test_too_many_open_plans(setup: Setup) -> None:
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    with pytest.raises(LimitExceededError, match="plans"):
        plan_often(engine, 20)


def test_pipelined_requests_are_answered_in_order(setup: Setup) -> None:
    """A whole step is sent before its first answer is read."""
    engine, tokens = setup.engine(), [3, 1, 4, 1, 5]
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(2))}))
    plan = compute_pb2.Plan(
        plan_id=1, sequence_ids=pack_u64([0]), query_lengths=pack_u32([5]), kv_lengths=pack_u32([5])
    )
    sent = [engine.send(plan=plan)]
    for layer in range(2):
        query, key, value = ORACLE.rows(tokens, 0, 5, layer)
        rows = {"query": query, "key": key, "value": value}
        sent.append(engine.send(run=run_of(1, layer, rows)))
    sent.append(engine.send(close=compute_pb2.ClosePlan(plan_id=1)))
    answers = [engine.receive() for _ in sent]
    assert [answer.request_id for answer in answers] == sent
    assert [answer.WhichOneof("response") for answer in answers] == ["plan", "run", "run", "closed"]


def test_get_shard(setup: Setup) -> None:
    shard = setup.engine().stub.GetShard(compute_pb2.GetShardRequest())
    assert shard.pool_id == "default"
    assert shard.control_plane_connected
    assert shard.incarnation == 1
    assert shard.pool_bytes >= 64 * BLOCK_TOKENS * 2 * 2 * 2 * 16 * 4
