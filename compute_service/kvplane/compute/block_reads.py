"""ReadBlocks: bytes of sealed or own blocks, one piece after the other at the reader's pace."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import torch

from kvplane.compute.block_access import (
    Caller,
    block_tensor,
    check_alive,
    check_granted,
    check_role,
    identify,
    layers_of,
)
from kvplane.compute.block_copies import blocks_of
from kvplane.compute.crc32c import crc32c
from kvplane.compute.executor import Executor
from kvplane.compute.layout import ROLES
from kvplane.compute.occupancy import Ids
from kvplane.compute.state import ShardState
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.wire import features
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.packed import U64Array, pack_u32, pack_u64

DEFAULT_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A checked request."""

    caller: Caller
    ids: Ids
    generations: U64Array
    layers: list[int]
    roles: list[int]
    blocks_per_piece: int
    checksums: bool


class BlockReads:
    """Serves reads."""

    def __init__(self, state: ShardState, executor: Executor) -> None:
        self._state = state
        self._executor = executor

    async def read(self, request: compute_pb2.ReadBlocksRequest) -> AsyncIterator[compute_pb2.ReadBlocksResponse]:
        """Pieces layer by layer; each is checked when it is copied. Raises what refuses it."""
        reading = await self._executor.submit(lambda: self._open(request))
        for layer in reading.layers:
            for role in reading.roles:
                for first in range(0, len(reading.ids), reading.blocks_per_piece):
                    piece = await self._executor.submit(
                        lambda at=(layer, role, first): self._piece(reading, *at)  # type: ignore[misc]
                    )
                    yield compute_pb2.ReadBlocksResponse(piece=piece)

    def _open(self, request: compute_pb2.ReadBlocksRequest) -> Reading:
        features.require(request.required_features)
        caller = identify(self._state, request.session_id, request.lease_epoch, request.session_secret, request.grants)
        holding = caller.holding
        ids, generations = blocks_of(request.blocks, "blocks", holding.pool.num_blocks)
        check_granted(caller, ids, generations, exported=True)
        for role in request.roles:
            check_role(role, "roles")
        size, limit = holding.pool.layout.role_block_bytes, request.max_chunk_bytes
        if limit > MAX_CHUNK_BYTES or 0 < limit < size:
            raise InvalidArgumentError.of(
                "max_chunk_bytes", f"{limit} is not between a block's {size} and {MAX_CHUNK_BYTES} bytes"
            )
        return Reading(
            caller,
            ids,
            generations,
            layers_of(holding, request.layers if request.HasField("layers") else None),
            [role for role in ROLES if not request.roles or role in request.roles],
            max(1, (limit or DEFAULT_CHUNK_BYTES) // size),
            request.checksums,
        )

    def _piece(self, reading: Reading, layer: int, role: int, first: int) -> compute_pb2.BlockBytes:
        caller, end = reading.caller, first + reading.blocks_per_piece
        check_alive(self._state, caller)
        occupancy, size = caller.holding.occupancy, caller.holding.pool.layout.block_tokens
        ids, generations = reading.ids[first:end], reading.generations[first:end]
        filled = occupancy.filled(ids, generations)
        # Even of its own block a session sees what it wrote; of any other, nothing that is not sealed.
        occupancy.check_readable(ids, generations, np.maximum(filled, 1), caller.session.session_id)
        content = block_tensor(caller.holding, layer, role)[torch.from_numpy(ids)].cpu().contiguous()
        for index in np.flatnonzero(filled < size):
            content[index, int(filled[index]) :] = 0
        # An attached engine may have begun a new occupant meanwhile: stamps come before bytes, so this shows it.
        occupancy.check_current(ids, generations)
        rows = content.view(torch.uint8).numpy().reshape(len(ids), -1)
        return compute_pb2.BlockBytes(
            blocks=types_pb2.BlockList(block_ids=pack_u32(ids), generations=pack_u64(generations)),
            layer=layer,
            role=types_pb2.TensorRole.ValueType(role),
            payload=rows.tobytes(),
            checksums=pack_u32(crc32c(rows)) if reading.checksums else b"",
        )
