"""The control stream: commands, acknowledgements, events, and what a shard does while the control plane is away."""

from hashlib import sha256

import grpc
import numpy as np
import pytest

from compute_attached import attach
from compute_control import ControlPlane, Shard, block_list
from compute_engine import read_request
from compute_harness import Setup, step
from kvplane.v1 import registry_pb2, step_pb2, types_pb2
from kvplane.wire import directory
from kvplane.wire.errors import KvplaneError, PoolLostError, StaleEpochError
from kvplane.wire.packed import unpack_u64
from kvplane.wire.status import from_status


def rows_of(setup: Setup) -> directory.Rows:
    holding = setup.server.state.holding
    assert holding is not None
    return holding.pool.directory.blocks


def stamps_of(setup: Setup) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    holding = setup.server.state.holding
    assert holding is not None
    return holding.pool.stamps


def resend(shard: Shard, message: registry_pb2.ControlResponse, sequence: int) -> registry_pb2.CommandAck:
    """Send a command under a number that was used before."""
    again = type(shard.acks[sequence])()
    shard.acks[sequence] = again
    message.sequence = sequence
    shard.outgoing.put(message)
    return again.result(10)


def test_a_command_that_comes_again_gets_its_stored_answer(setup: Setup) -> None:
    """It is not carried out twice: a pool that is created again would lose its rows."""
    engine, blocks = setup.engine(), setup.blocks(2)
    step(engine, 0, [1, 2, 3, 4, 5], 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    seal = registry_pb2.Seal(
        blocks=[block_list(blocks)],
        digests=bytes(64),
        parent_digests=bytes(64),
        depths=bytes(8),
        namespace_ids=bytes(8),
    )
    shard = setup.control.shards[0]
    first = setup.control.send(registry_pb2.ControlResponse(seal=seal)).result(10)
    assert first.success_bitmap == b"\x01"
    number = shard.sequence
    message = registry_pb2.ControlResponse(incarnation=1, boot_id=shard.register.boot_id, seal=registry_pb2.Seal())
    assert resend(shard, message, number) == first


def test_seals_follow_stamp_row_and_fill(setup: Setup) -> None:
    """Sealed is what is full and of the newest generation; the acknowledgement names the rest."""
    engine, blocks = setup.engine(), setup.blocks(3)
    step(engine, 0, [1, 2, 3, 4, 5], 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    newer = setup.control.new_blocks([blocks[0][0]])
    assert setup.control.seal(blocks) == [True, False, False]
    assert setup.control.seal(newer) == [False]
    block, generation = blocks[0]
    row = rows_of(setup)[block]
    assert row["flags"] == directory.SEALED
    assert row["digest"].tobytes() == sha256(repr((block, generation)).encode()).digest()


def test_attached_engines_fill_by_themselves(setup: Setup) -> None:
    """A stamp that an engine wrote is enough: its row is still that of the occupant before."""
    blocks = setup.blocks(1)
    stamps_of(setup)[blocks[0][0]] = blocks[0][1]
    assert setup.control.seal(blocks) == [True]
    row = rows_of(setup)[blocks[0][0]]
    assert (row["generation"], row["filled"]) == (blocks[0][1], 4)


def test_void_takes_the_right_generation_only(setup: Setup) -> None:
    engine, blocks = setup.engine(), setup.blocks(2)
    step(engine, 0, list(range(8)), 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    assert setup.control.seal(blocks) == [True, True]
    stale = [(blocks[0][0], blocks[0][1] - 1), blocks[1]]
    void = registry_pb2.VoidRows(blocks=[block_list(stale)], zeroize=True)
    assert setup.control.command(void_rows=void).success_bitmap == b"\x02"
    rows = rows_of(setup)
    assert [int(rows[block]["flags"]) for block, _ in blocks] == [1, 0]
    with pytest.raises(grpc.RpcError):
        list(engine.stub.ReadBlocks(read_request(engine.session, blocks[1:])))


def test_another_boot_is_refused(setup: Setup) -> None:
    ack = setup.control.send(
        registry_pb2.ControlResponse(boot_id=12345, raise_incarnation=registry_pb2.RaiseIncarnation())
    ).result(10)
    # It was not this boot's number: the next one of this boot has it.
    setup.control.shards[0].sequence -= 1
    assert isinstance(from_status(ack.status), StaleEpochError)


def test_namespaces_never_fall(setup: Setup) -> None:
    for version in (3, 2):
        row = registry_pb2.NamespaceRow(
            namespace_id=7, root_digest=bytes(32), tenant_id="t", version=version, identity=b"i"
        )
        setup.control.command(put_namespaces=registry_pb2.PutNamespaces(namespaces=[row]))
    holding = setup.server.state.holding
    assert holding is not None
    assert holding.pool.directory.namespaces["version"][0] == 3


def test_what_is_not_built_is_refused(setup: Setup) -> None:
    ack = setup.control.command(check=False, resize_segments=registry_pb2.ResizeSegments())
    assert from_status(ack.status).reason == "UNSUPPORTED_FEATURE"


def test_the_inventory_is_the_directory(setup: Setup) -> None:
    """Rows, stamps, tables and hold maps come in block order; stamps come alone when asked for so."""
    engine, blocks = setup.engine(), setup.blocks(2)
    step(engine, 3, list(range(6)), 0, setup.control.grant(engine.session, {3: (0, blocks)}))
    setup.control.seal(blocks[:1])
    chunks = setup.control.upload(1, stamps=True)
    rows = np.frombuffer(b"".join(chunk.rows for chunk in chunks), directory.BLOCK_ROW)
    assert rows.tobytes() == rows_of(setup).tobytes()
    stamps = np.frombuffer(b"".join(chunk.stamps for chunk in chunks), "<u8")
    assert directory.sealed_mask(rows, stamps)[blocks[0][0]]
    assert [chunk.last for chunk in chunks].count(True) == 1
    assert chunks[-1].last
    tables = {table.sequence_id: table for chunk in chunks for table in chunk.granted_tables}
    assert unpack_u64("g", tables[3].blocks[0].generations).tolist() == [mark for _, mark in blocks]
    alone = setup.control.upload(2, stamps=True, omit_rows=True)
    assert b"".join(chunk.stamps for chunk in alone) == stamps.tobytes()
    assert not any(chunk.rows for chunk in alone)


def test_a_pool_that_cannot_fit_is_refused_before_anything_is_allocated(fresh: Setup) -> None:
    before = sorted(path.name for path in fresh.server.state.identity.folder.iterdir())
    ack = fresh.control.create_pool(1 << 30, check=False)
    error = from_status(ack.status)
    assert error.reason == "LIMIT_EXCEEDED"
    assert error.metadata["limit"] == "shared_memory_bytes"
    assert before
    assert sorted(path.name for path in fresh.server.state.identity.folder.iterdir()) == ["lock"]
    fresh.control.create_pool(64)
    step(engine := fresh.engine(), 0, [1], 0, fresh.control.grant(engine.session, {0: (0, fresh.blocks(1))}))


def test_a_destroyed_pool_refuses_work(fresh: Setup) -> None:
    engine = fresh.engine()
    engine.apply(fresh.control.grant(engine.session, {0: (0, fresh.blocks(1))}))
    fresh.control.command(destroy_pool=registry_pb2.DestroyPool(pool_epoch=1))
    with pytest.raises(Exception, match="no pool"):
        engine.plan({0: (1, 1)})


def test_granted_work_goes_on_without_the_control_plane(fresh: Setup) -> None:
    """It comes back with a higher incarnation; older grants are refused then."""
    engine, blocks = fresh.engine(), fresh.blocks(3)
    step(engine, 0, [1, 2], 0, fresh.control.grant(engine.session, {0: (0, blocks)}))
    late = fresh.control.grant(engine.session, {1: (0, fresh.blocks(1))})
    fresh.control.stop()
    step(engine, 0, [1, 2, 3], 2)
    other = ControlPlane(incarnation=2)
    other.pool_epoch = fresh.control.pool_epoch
    other.start(f"unix:{fresh.folder / 'cache.sock'}")
    other.wait()
    held = other.shards[0].register.held_pool
    assert [session.session_id for session in held.sessions] == [engine.session.session_id]
    assert (held.incarnation, held.pool_epoch, held.num_blocks) == (1, 1, 64)
    other.command(raise_incarnation=registry_pb2.RaiseIncarnation())
    step(engine, 0, [1, 2, 3, 4], 3)
    with pytest.raises(StaleEpochError, match="incarnation"):
        engine.apply(late)
    holding = fresh.server.state.holding
    assert holding is not None
    assert holding.pool.incarnation == 2
    other.stop()


def test_a_new_occupant_of_an_older_control_plane_is_never_stamped(fresh: Setup) -> None:
    """Granted before the restart and never written: nothing of it is launched any more."""
    engine, blocks = fresh.engine(), fresh.blocks(1)
    engine.apply(fresh.control.grant(engine.session, {0: (0, blocks)}))
    fresh.control.incarnation = 2
    fresh.control.command(raise_incarnation=registry_pb2.RaiseIncarnation())
    with pytest.raises(StaleEpochError, match=f"block {blocks[0][0]}"):
        step(engine, 0, [1, 2], 0)
    assert stamps_of(fresh)[blocks[0][0]] == 0


def test_an_older_control_plane_is_superseded(fresh: Setup) -> None:
    """A lower incarnation is told so and gets nothing done."""
    fresh.control.command(raise_incarnation=registry_pb2.RaiseIncarnation())
    message = registry_pb2.ControlResponse(incarnation=5, raise_incarnation=registry_pb2.RaiseIncarnation())
    fresh.control.send(message).result(10)
    fresh.control.send(registry_pb2.ControlResponse(destroy_pool=registry_pb2.DestroyPool(pool_epoch=1)))
    assert fresh.control.wait_event("superseded").superseded.incarnation == 5
    assert fresh.server.state.holding is not None


def test_a_new_epoch_on_surviving_memory(fresh: Setup) -> None:
    """Sealed rows stay, everything else is void, and streams of the old epoch are lost."""
    engine, blocks = fresh.engine(), fresh.blocks(2)
    step(engine, 0, list(range(6)), 0, fresh.control.grant(engine.session, {0: (0, blocks)}))
    fresh.control.seal(blocks[:1])
    fresh.control.command(advance_epoch=registry_pb2.AdvanceEpoch(pool_epoch=2, keep_sealed=True))
    fresh.control.pool_epoch = 2
    with pytest.raises(Exception, match="gone"):
        engine.plan({0: (1, 7)})
    again = fresh.engine(engine.session)

    def reset(body: step_pb2.GrantBody) -> None:
        body.reset = True

    grant = fresh.control.grant(engine.session, {0: (0, [blocks[0], *fresh.blocks(1)])}, reset)
    step(again, 0, list(range(6)), 4, grant)


def test_a_new_pool_takes_the_memory_of_the_old_one(fresh: Setup) -> None:
    """There is seldom room for both. Nothing of the old content is readable, and its streams are lost."""
    engine, blocks = fresh.engine(), fresh.blocks(1)
    step(engine, 0, [1, 2, 3, 4], 0, fresh.control.grant(engine.session, {0: (0, blocks)}))
    fresh.control.seal(blocks)
    files = [path for path in fresh.server.state.identity.folder.iterdir() if path.name.startswith("blocks")]
    inode = files[0].stat().st_ino
    fresh.control.create_pool(64)
    assert files[0].stat().st_ino == inode
    assert not rows_of(fresh)["flags"].any()
    assert not stamps_of(fresh).any()
    with pytest.raises(PoolLostError):
        engine.plan({0: (1, 5)})
    other = fresh.engine()
    with pytest.raises(KvplaneError):
        step(other, 0, [1, 2, 3, 4, 5], 4, fresh.control.grant(other.session, {0: (0, [*blocks, *fresh.blocks(1)])}))


def test_attached_processes_keep_the_memory_they_mapped(fresh: Setup) -> None:
    """A new pool gets memory of its own then, and they are told."""
    session = fresh.control.open_session(types_pb2.SESSION_MODE_ATTACHED)
    memory = attach(fresh.address, session.session_id, session.lease_epoch, session.secret)
    before = memory.blocks(0, types_pb2.TENSOR_ROLE_KEY).clone()
    fresh.control.create_pool(64)
    assert memory.receive().pool_released.pool_epoch == 1
    other = fresh.engine()
    step(other, 0, [1, 2, 3], 0, fresh.control.grant(other.session, {0: (0, fresh.control.new_blocks([1]))}))
    assert memory.blocks(0, types_pb2.TENSOR_ROLE_KEY).equal(before)
    memory.close()
