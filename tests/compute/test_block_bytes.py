"""ReadBlocks and WriteBlocks: what goes in comes out, in canonical order, and nothing else does."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from compute_control import Blocks, EngineSession, block_list
from compute_engine import RemoteEngine, read_request
from compute_harness import ORACLE, Setup, step
from compute_oracle import assert_attention
from kvplane.compute.crc32c import crc32c
from kvplane.v1 import compute_pb2, step_pb2, types_pb2
from kvplane.wire.errors import KvplaneError
from kvplane.wire.packed import pack_u32, unpack_u32
from kvplane.wire.status import from_rpc_error

TOKENS = list(range(40, 48))


def read(engine: RemoteEngine, blocks: Blocks, **more: Any) -> list[compute_pb2.BlockBytes]:
    try:
        return [each.piece for each in engine.stub.ReadBlocks(read_request(engine.session, blocks, **more), timeout=20)]
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def opening(session: EngineSession, *grants: step_pb2.Grant) -> compute_pb2.WriteBlocksRequest:
    return compute_pb2.WriteBlocksRequest(
        open=compute_pb2.WriteBlocksOpen(
            session_id=session.session_id,
            lease_epoch=session.lease_epoch,
            session_secret=session.secret,
            op_id=5,
            grants=grants,
        )
    )


def pieces(blocks: Blocks, tokens: list[int]) -> Iterator[compute_pb2.BlockBytes]:
    """Whole blocks of every layer and role."""
    for layer in range(ORACLE.num_layers):
        _, key, value = ORACLE.rows(tokens, 0, len(tokens), layer)
        for role, tensor in ((types_pb2.TENSOR_ROLE_KEY, key), (types_pb2.TENSOR_ROLE_VALUE, value)):
            payload = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            sums = crc32c(np.frombuffer(payload, np.uint8).reshape(len(blocks), -1))
            yield compute_pb2.BlockBytes(
                blocks=block_list(blocks), layer=layer, role=role, payload=payload, checksums=pack_u32(sums)
            )


def write(engine: RemoteEngine, *requests: compute_pb2.WriteBlocksRequest) -> list[compute_pb2.WriteBlocksResponse]:
    try:
        return list(engine.stub.WriteBlocks(iter(requests), timeout=20))
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def as_requests(all_pieces: "list[compute_pb2.BlockBytes]") -> list[compute_pb2.WriteBlocksRequest]:
    return [compute_pb2.WriteBlocksRequest(piece=piece) for piece in all_pieces]


def test_crc32c() -> None:
    """The check value of the standard, and lengths around eight bytes."""
    assert crc32c(np.frombuffer(b"123456789", np.uint8)[None]).tolist() == [0xE3069283]
    assert crc32c(np.zeros((1, 32), np.uint8)).tolist() == [0x8A9136AA]
    assert crc32c(np.full((1, 32), 0xFF, np.uint8)).tolist() == [0x62A8AB43]
    assert crc32c(np.arange(32, dtype=np.uint8)[None]).tolist() == [0x46DD794E]
    assert crc32c(np.zeros((1, 0), np.uint8)).tolist() == [0]


def test_bytes_travel_from_pool_to_session(setup: Setup) -> None:
    """Blocks that one session read are written by another, sealed, and attended to."""
    source, target = setup.engine(), setup.engine()
    blocks, copies, tail = setup.blocks(2), setup.blocks(2), setup.blocks(1)
    step(source, 0, TOKENS, 0, setup.control.grant(source.session, {0: (0, blocks)}))
    out = read(source, blocks, checksums=True)
    assert [piece.SerializeToString() for piece in out] == [
        piece.SerializeToString() for piece in pieces(blocks, TOKENS)
    ]
    for piece in out:
        piece.blocks.CopyFrom(block_list(copies))
    grant = setup.control.grant(target.session, {0: (0, [*copies, *tail])})
    answers = write(target, opening(target.session, grant), *as_requests(out))
    assert [answer.written_bytes for answer in answers[1:-1]] == [len(out[0].payload) * n for n in (1, 2, 3, 4)]
    assert answers[0].credit_bytes > 0
    assert answers[-1].ack == types_pb2.Ack(op_id=5)
    assert setup.control.seal(copies) == [True, True]
    for layer, got in enumerate(step(target, 0, [*TOKENS, 9], 8)):
        assert_attention(got, ORACLE.attention([*TOKENS, 9], 8, 9, layer))


def test_chunks_and_selections(setup: Setup) -> None:
    engine, blocks = setup.engine(), setup.blocks(2)
    step(engine, 0, TOKENS, 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    size = 4 * 2 * 16 * 4
    one = read(
        engine,
        blocks,
        layers=types_pb2.LayerRange(first=1, count=1),
        roles=[types_pb2.TENSOR_ROLE_VALUE],
        max_chunk_bytes=size,
    )
    assert [(piece.layer, piece.role, len(piece.payload)) for piece in one] == [(1, 2, size)] * 2
    assert [unpack_u32("ids", piece.blocks.block_ids).tolist() for piece in one] == [[block] for block, _ in blocks]
    for bad in (
        {"max_chunk_bytes": size - 1},
        {"max_chunk_bytes": 1 << 30},
        {"layers": types_pb2.LayerRange(first=1, count=2)},
        {"layers": types_pb2.LayerRange()},
        {"roles": [types_pb2.TENSOR_ROLE_QUERY]},
        {"required_features": ["teleport"]},
    ):
        with pytest.raises(KvplaneError):
            read(engine, blocks, **bad)


def test_unwritten_slots_of_an_own_block_read_as_zeros(setup: Setup) -> None:
    """What the occupant before left there belongs to nobody who asks now."""
    first, second = setup.engine(), setup.engine()
    blocks = setup.blocks(1)
    step(first, 0, [1, 2, 3, 4], 0, setup.control.grant(first.session, {0: (0, blocks)}))
    again = setup.control.new_blocks([blocks[0][0]])
    step(second, 0, [7], 0, setup.control.grant(second.session, {0: (0, again)}))
    for piece in read(second, again):
        slots = torch.frombuffer(bytearray(piece.payload), dtype=torch.float32).view(4, 2, 16)
        assert slots[0].any()
        assert not slots[1:].any()


def test_only_granted_blocks_are_read(setup: Setup) -> None:
    writer, other = setup.engine(), setup.engine()
    blocks = setup.blocks(1)
    step(writer, 0, [1, 2, 3, 4], 0, setup.control.grant(writer.session, {0: (0, blocks)}))
    with pytest.raises(KvplaneError) as refused:
        read(other, blocks)
    assert refused.value.reason == "NOT_GRANTED"
    setup.control.seal(blocks)
    with pytest.raises(KvplaneError) as refused:
        read(other, blocks)
    assert refused.value.reason == "NOT_GRANTED"

    def export(expires: int) -> step_pb2.Grant:
        def change(body: step_pb2.GrantBody) -> None:
            body.number, body.export_op_id, body.expires_time_ms = 0, 3, expires
            body.readable.append(block_list(blocks))

        return setup.control.grant(other.session, change=change)

    assert len(read(other, blocks, grants=[export(1 << 50)])) == 4
    with pytest.raises(KvplaneError, match="expired"):
        read(other, blocks, grants=[export(1)])
    with pytest.raises(KvplaneError, match="export"):
        other.apply(export(1 << 50))


def test_a_write_that_is_not_whole_fills_nothing(setup: Setup) -> None:
    engine, blocks = setup.engine(), setup.blocks(2)
    grant = setup.control.grant(engine.session, {0: (0, blocks)})
    some = list(pieces(blocks, TOKENS))[:3]
    answers = write(engine, opening(engine.session, grant), *as_requests(some))
    assert answers[-1].ack.success_bitmap == b"\x00"
    assert answers[-1].ack.status.code
    assert setup.control.seal(blocks) == [False, False]


def test_wrong_pieces_are_refused(setup: Setup) -> None:
    engine = setup.engine()
    blocks, foreign = setup.blocks(1), setup.blocks(1)
    engine.apply(setup.control.grant(engine.session, {0: (0, blocks)}))
    good = next(pieces(blocks, TOKENS[:4]))

    def changed(**fields: Any) -> compute_pb2.BlockBytes:
        piece = compute_pb2.BlockBytes()
        piece.CopyFrom(good)
        for name, value in fields.items():
            if name == "blocks":
                piece.blocks.CopyFrom(value)
            else:
                setattr(piece, name, value)
        return piece

    for piece, reason in (
        (changed(payload=good.payload[:-1]), "INVALID_ARGUMENT"),
        (changed(checksums=pack_u32([1])), "DATA_LOSS"),
        (changed(layer=7), "INVALID_ARGUMENT"),
        (changed(role=types_pb2.TENSOR_ROLE_QUERY), "INVALID_ARGUMENT"),
        (changed(blocks=block_list(foreign)), "NOT_GRANTED"),
        (changed(blocks=block_list([(0, 0)])), "INVALID_ARGUMENT"),
        (
            changed(blocks=block_list([blocks[0], blocks[0]]), payload=good.payload * 2, checksums=b""),
            "INVALID_ARGUMENT",
        ),
    ):
        with pytest.raises(KvplaneError) as refused:
            write(engine, opening(engine.session), *as_requests([piece]))
        assert refused.value.reason == reason
    with pytest.raises(KvplaneError):
        write(engine, *as_requests([good]))


def test_a_fence_ends_a_read_half_way(setup: Setup) -> None:
    """The piece after the fence is refused: checks are made for each."""
    engine, blocks = setup.engine(), setup.blocks(2)
    step(engine, 0, TOKENS, 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    setup.control.fence(engine.session)
    with pytest.raises(KvplaneError) as refused:
        read(engine, blocks)
    assert refused.value.reason == "SESSION_EXPIRED"
