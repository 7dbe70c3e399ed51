"""Which blocks a session may name outside plans, and their bytes in canonical order: block, slot, head, dimension."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from kvplane.compute.block_copies import blocks_of
from kvplane.compute.grants import apply_grants, open_grant
from kvplane.compute.occupancy import Ids
from kvplane.compute.sessions import Session
from kvplane.compute.state import Holding, ShardState
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.errors import InvalidArgumentError, NotGrantedError, PoolLostError
from kvplane.wire.packed import U64Array


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """A session that proved who it is, and what export grants let it read on top of its tables."""

    session: Session
    lease_epoch: int
    holding: Holding
    exported_ids: Ids
    exported_generations: U64Array


def identify(
    state: ShardState, session_id: int, lease_epoch: int, secret: bytes, grants: Iterable[step_pb2.Grant]
) -> Caller:
    """Authenticate and apply grants: step grants change tables, export grants stand for this call alone."""
    holding = state.admitting()
    session = holding.sessions.authenticate(session_id, lease_epoch, secret)
    readable: list[types_pb2.BlockList] = []
    for grant in grants:
        body = open_grant(state, session, grant)
        if body.number:
            apply_grants(state, session, [grant])
            continue
        if body.expires_time_ms <= time.time() * 1000:
            raise NotGrantedError(f"export grant of operation {body.export_op_id} has expired")
        readable.extend(body.readable)
    ids, generations = blocks_of(readable, "grants.readable", holding.pool.num_blocks)
    return Caller(session, lease_epoch, holding, ids, generations)


def check_alive(state: ShardState, caller: Caller) -> None:
    """Before each piece: the session is not fenced meanwhile and the pool is still the same."""
    if state.held() is not caller.holding:
        raise PoolLostError("the pool that the call began on is gone")
    caller.session.check(caller.lease_epoch)


def check_granted(caller: Caller, ids: Ids, generations: U64Array, *, exported: bool) -> None:
    """Raises `NotGrantedError` for a block that is in no table of the session, nor exported to it (for reading).
    Attached sessions are trusted with the whole pool."""
    if caller.session.mode == types_pb2.SESSION_MODE_ATTACHED:
        return
    tables = caller.session.tables.values()
    known = [table.block_ids.astype(np.uint64) for table in tables]
    marks = [table.generations for table in tables]
    if exported:
        known.append(caller.exported_ids.astype(np.uint64))
        marks.append(caller.exported_generations)
    wanted = np.stack((ids.astype(np.uint64), generations), 1)
    granted: set[tuple[int, int]] = set()
    for some_ids, some_marks in zip(known, marks, strict=True):
        near = np.isin(some_ids, wanted[:, 0])
        granted.update(zip(some_ids[near].tolist(), some_marks[near].tolist(), strict=True))
    for block_id, generation in wanted.tolist():
        if (block_id, generation) not in granted:
            raise NotGrantedError(
                f"block {block_id} of generation {generation} is in no table of session {caller.session.session_id}",
                metadata={"block_id": str(block_id), "generation": str(generation)},
            )


def layers_of(holding: Holding, layers: types_pb2.LayerRange | None) -> list[int]:
    """Layers of a range, all when there is none. Raises `InvalidArgumentError` for layers that are not held here."""
    held = holding.pool.layout.layers
    if layers is None:
        return list(held)
    if layers.count == 0:
        raise InvalidArgumentError.of("layers.count", "must be at least 1")
    inside = [layer for layer in held if layers.first <= layer < layers.first + layers.count]
    if len(inside) != layers.count:
        raise InvalidArgumentError.of("layers", f"this shard holds layers {held[0]} to {held[-1]}")
    return inside


def check_role(role: int, field: str) -> None:
    """Raises `InvalidArgumentError` for a tensor that the pool has not."""
    if role not in (types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE):
        raise InvalidArgumentError.of(field, f"{role} is neither keys nor values")


def block_tensor(holding: Holding, layer: int, role: int) -> torch.Tensor:
    """A layer's blocks as a view [blocks, slots, heads, head_dim]."""
    found = holding.pool.layers[layer]
    tensor = found.keys[0] if role == types_pb2.TENSOR_ROLE_KEY else found.values[0]
    return tensor.transpose(1, 2)
