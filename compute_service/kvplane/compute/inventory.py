"""A shard's directory as the control plane reads it: in chunks, each a snapshot taken between two jobs."""

from collections.abc import Callable, Iterator
from itertools import islice

from kvplane.compute.state import Holding
from kvplane.v1 import registry_pb2, types_pb2
from kvplane.wire import tables as directory_tables
from kvplane.wire.directory import Rows

CHUNK_BLOCKS = 16_384
"""Blocks per message: 1.5 MiB of rows."""

TABLES_PER_CHUNK = 256

Chunk = Callable[[], registry_pb2.InventoryRequest]


def chunks(holding: Holding, request: registry_pb2.RequestInventory) -> Iterator[Chunk]:
    """Jobs for the device thread, each of which makes one message; the last one has `last` set."""
    num_blocks = holding.pool.num_blocks
    if not request.omit_rows or request.stamps:
        for first in range(0, num_blocks, CHUNK_BLOCKS):
            yield lambda first=first: _blocks(holding, request, first)  # type: ignore[misc]
    if request.hold_maps:
        for process in holding.processes.all():
            yield lambda process=process: registry_pb2.InventoryRequest(  # type: ignore[misc]
                first_block=num_blocks,
                hold_maps=[
                    registry_pb2.HoldMap(
                        session_id=process.session_id,
                        process=process.reference,
                        bitmap=process.bits().tobytes(),
                        lease_epoch=process.lease_epoch,
                    )
                ],
            )
    tables = _tables(holding)
    while batch := list(islice(tables, TABLES_PER_CHUNK)):
        yield lambda batch=batch: registry_pb2.InventoryRequest(  # type: ignore[misc]
            first_block=num_blocks, granted_tables=batch
        )
    yield lambda: registry_pb2.InventoryRequest(first_block=num_blocks, last=True)


def _blocks(holding: Holding, request: registry_pb2.RequestInventory, first: int) -> registry_pb2.InventoryRequest:
    pool, end = holding.pool, first + CHUNK_BLOCKS
    return registry_pb2.InventoryRequest(
        first_block=first,
        rows=b"" if request.omit_rows else pool.directory.blocks[first:end].tobytes(),
        stamps=pool.stamps[first:end].tobytes() if request.stamps else b"",
    )


def _tables(holding: Holding) -> Iterator[registry_pb2.GrantedTable]:
    for session in holding.sessions:
        for sequence_id, table in list(session.tables.items()):
            blocks = types_pb2.BlockList(block_ids=table.block_ids.tobytes(), generations=table.generations.tobytes())
            yield registry_pb2.GrantedTable(session_id=session.session_id, sequence_id=sequence_id, blocks=[blocks])


def held_pool(holding: Holding) -> registry_pb2.HeldPool:
    """What a shard still has, for its registration."""
    pool, directory = holding.pool, holding.pool.directory
    return registry_pb2.HeldPool(
        pool_epoch=pool.pool_epoch,
        incarnation=pool.incarnation,
        num_blocks=pool.num_blocks,
        segments=[types_pb2.SegmentSpec(num_blocks=pool.num_blocks)],
        namespaces=[_namespace(directory.namespaces, index) for index in directory_tables.used(directory.namespaces)],
        sessions=[
            registry_pb2.ServedSession(
                session_id=session.session_id,
                lease_epoch=session.lease_epoch,
                tenant_id=session.tenant_id,
                ttl_ms=session.ttl_ms,
                mode=session.mode,
                processes=[each.reference for each in holding.processes.of_session(session.session_id)],
                fenced=session.fenced,
                last_grant=session.last_grant,
                max_sequences=session.max_sequences,
            )
            for session in holding.sessions
        ],
        model_identity=directory.model_identity,
    )


def _namespace(rows: Rows, index: int) -> registry_pb2.NamespaceRow:
    row = rows[index]
    return registry_pb2.NamespaceRow(
        namespace_id=int(row["namespace_id"]),
        root_digest=row["root"].tobytes(),
        tenant_id=directory_tables.text(rows, index, "tenant").decode(),
        version=int(row["version"]),
        identity=directory_tables.text(rows, index, "identity"),
    )
