"""WriteBlocks: whole blocks from outside, piece by piece; a block counts as filled when its last piece is in."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import torch

from kvplane.compute.block_access import Caller, block_tensor, check_alive, check_granted, check_role, identify
from kvplane.compute.block_copies import blocks_of
from kvplane.compute.crc32c import crc32c
from kvplane.compute.executor import Executor
from kvplane.compute.layout import ROLES
from kvplane.compute.occupancy import Ids
from kvplane.compute.state import ShardState
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.wire import features
from kvplane.wire.errors import DataLossError, InvalidArgumentError, LimitExceededError, PermissionDeniedError
from kvplane.wire.packed import U64Array, unpack_u32
from kvplane.wire.status import to_status

WINDOW_BYTES = 16 << 20
"""Bytes that a writer may have sent and not seen written."""


@dataclass(slots=True, eq=False)
class Writing:
    """A write in progress."""

    caller: Caller
    op_id: int
    parts: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)
    """Layers and roles that are in, by block id and generation, in the order in which blocks were first named."""
    written_bytes: int = 0


class BlockWrites:
    """Serves writes."""

    def __init__(self, state: ShardState, executor: Executor) -> None:
        self._state = state
        self._executor = executor

    async def write(
        self, requests: AsyncIterator[compute_pb2.WriteBlocksRequest]
    ) -> AsyncIterator[compute_pb2.WriteBlocksResponse]:
        """One answer per piece, the acknowledgement in the last one. Raises what refuses a piece; what was written
        before stays, as blocks that are not filled."""
        opening = await anext(requests, None)
        if opening is None:
            return
        writing = await self._executor.submit(lambda: self._open(opening))
        yield compute_pb2.WriteBlocksResponse(credit_bytes=WINDOW_BYTES)
        async for request in requests:
            if request.WhichOneof("message") != "piece":
                raise InvalidArgumentError.of("message", "only pieces follow the first message")
            piece = request.piece
            await self._executor.submit(lambda p=piece: self._write(writing, p))  # type: ignore[misc]
            yield compute_pb2.WriteBlocksResponse(credit_bytes=WINDOW_BYTES, written_bytes=writing.written_bytes)
        yield compute_pb2.WriteBlocksResponse(written_bytes=writing.written_bytes, ack=self._ack(writing))

    def _open(self, request: compute_pb2.WriteBlocksRequest) -> Writing:
        if request.WhichOneof("message") != "open":
            raise InvalidArgumentError.of("open", "must be the first message of a stream")
        opening = request.open
        features.require(opening.required_features)
        caller = identify(self._state, opening.session_id, opening.lease_epoch, opening.session_secret, opening.grants)
        if caller.session.mode != types_pb2.SESSION_MODE_REMOTE:
            raise PermissionDeniedError("an attached session writes by itself")
        return Writing(caller, opening.op_id)

    def _write(self, writing: Writing, piece: compute_pb2.BlockBytes) -> None:
        caller = writing.caller
        check_alive(self._state, caller)
        holding, session_id = caller.holding, caller.session.session_id
        layout, occupancy = holding.pool.layout, holding.occupancy
        ids, generations = blocks_of([piece.blocks], "piece.blocks", holding.pool.num_blocks)
        if len(np.unique(ids)) != len(ids):
            raise InvalidArgumentError.of("piece.blocks", "a block is named twice")
        check_role(piece.role, "piece.role")
        if piece.layer not in layout.layers:
            raise InvalidArgumentError.of("piece.layer", f"{piece.layer} is not held by this shard")
        rows = self._rows(piece, len(ids), layout.role_block_bytes)
        check_granted(caller, ids, generations, exported=False)
        occupancy.check_writable(ids, generations, np.zeros(len(ids), np.int64), session_id)
        occupancy.check_unpinned(ids, generations, caller.session.pinned())
        occupancy.occupy(ids, generations, session_id)
        target = block_tensor(holding, piece.layer, piece.role)
        content = torch.from_numpy(rows).view(layout.dtype).view(len(ids), *target.shape[1:])
        target[torch.from_numpy(ids)] = content.to(target.device)
        writing.written_bytes += len(piece.payload)
        self._note(writing, piece, ids, generations)

    def _note(self, writing: Writing, piece: compute_pb2.BlockBytes, ids: Ids, generations: U64Array) -> None:
        layout = writing.caller.holding.pool.layout
        whole = []
        for block in zip(ids.tolist(), generations.tolist(), strict=True):
            parts = writing.parts.setdefault(block, set())
            parts.add((piece.layer, piece.role))
            if len(parts) == len(layout.layers) * len(ROLES):
                whole.append(block[0])
        filled = np.array(whole, np.int64)
        writing.caller.holding.occupancy.fill(filled, np.full(len(filled), layout.block_tokens))

    def _rows(
        self, piece: compute_pb2.BlockBytes, count: int, size: int
    ) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        if len(piece.payload) > WINDOW_BYTES:
            raise LimitExceededError(
                f"a piece of {len(piece.payload)} bytes exceeds the credit",
                metadata={"limit": "credit_bytes", "value": str(WINDOW_BYTES)},
            )
        if len(piece.payload) != count * size:
            raise InvalidArgumentError.of(
                "piece.payload", f"has {len(piece.payload)} bytes, {count} blocks need {count * size}"
            )
        # A copy: torch does not take memory that it may not write.
        rows = np.frombuffer(piece.payload, np.uint8).copy().reshape(count, size)
        if piece.checksums:
            bad = unpack_u32("piece.checksums", piece.checksums, count) != crc32c(rows)
            if bad.any():
                index = int(bad.argmax())
                raise DataLossError(f"block {index} of the piece failed its checksum")
        return rows

    def _ack(self, writing: Writing) -> types_pb2.Ack:
        layout = writing.caller.holding.pool.layout
        whole = len(layout.layers) * len(ROLES)
        success = np.array([len(parts) == whole for parts in writing.parts.values()], np.bool_)
        if success.all():
            return types_pb2.Ack(op_id=writing.op_id)
        error = InvalidArgumentError("pieces of some blocks are missing")
        bitmap = np.packbits(success, bitorder="little").tobytes()
        return types_pb2.Ack(op_id=writing.op_id, success_bitmap=bitmap, status=to_status(error))
