"""The rules that bound what an attached engine can do: hold bits, stamps, incarnations, the lease."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from compute_access import BLOCK, Engine, Rig
from compute_oracle import assert_attention
from kvplane.cache.service.endings import end_session
from kvplane.client import AsyncSession, LaunchPausedError
from kvplane.client.compute import open_compute
from kvplane.compute.server import ComputeServer
from kvplane.wire import stamps
from kvplane.wire.errors import (
    InvalidArgumentError,
    NotGrantedError,
    PoolLostError,
    PreconditionError,
    SessionExpiredError,
    StaleEpochError,
    StaleGenerationError,
)
from service_rig import wait_until

TOKENS = list(range(10))


def held(server: ComputeServer, engine: Engine) -> set[int]:
    """Blocks whose bits are set in the newest hold map of a session."""
    holding = server.state.holding
    assert holding is not None
    process = holding.processes.of_session(engine.session.session_id)[-1]
    return set(stamps.held_blocks(process.bits()).tolist())


def named(engine: Engine, *sequence_ids: int) -> set[int]:
    """Blocks of sequences."""
    table = engine.session.sequences
    return {
        int(block)
        for each in sequence_ids
        for block in table.blocks[each & 0xFFFF_FFFF, : table.num_blocks[each & 0xFFFF_FFFF]]
    }


def plan(engine: Engine, *sequence_ids: int, new: int = 1) -> Any:
    """A plan of the newest tokens, for tests of what comes before a launch."""
    lengths = [len(engine.tokens[each]) for each in sequence_ids]
    return engine.compute.plan(sequence_ids, [new] * len(sequence_ids), lengths, num_query_heads=8)


def test_bits_and_stamps_come_before_the_plan(pool: Rig) -> None:
    """On every shard, exactly the blocks that the tables name; shared ones once."""
    engine = pool.engine()
    assert held(pool.servers[0], engine) == set()
    first, second = engine.admit(TOKENS), engine.admit([9, 8, 7])
    with plan(engine, first, second):
        for server in pool.servers:
            assert held(server, engine) == named(engine, first, second)
            holding = server.state.holding
            assert holding is not None
            for each in (first, second):
                row = each & 0xFFFF_FFFF
                count = engine.session.sequences.num_blocks[row]
                ids = engine.session.sequences.blocks[row, :count]
                assert holding.pool.stamps[ids].tolist() == engine.session.sequences.generations[row, :count].tolist()
    engine.finish(first, second)
    engine.close()


def test_a_bit_is_cleared_when_its_step_has_completed(pool: Rig) -> None:
    """A plan of an earlier step is open: what was let go of since stays held until it closes."""
    engine = pool.engine()
    kept, gone = engine.admit(TOKENS), engine.admit([3, 1, 4, 1, 5, 9])
    engine.forward(kept, gone)
    blocks = named(engine, gone)
    early = plan(engine, kept, gone)
    engine.finish(gone)
    with plan(engine, kept):
        assert held(pool.servers[1], engine) == named(engine, kept) | blocks
    early.close()
    with plan(engine, kept):
        assert [held(server, engine) for server in pool.servers] == [named(engine, kept)] * 2
    engine.finish(kept)
    engine.close()


def test_a_shared_block_is_held_until_the_last_that_names_it(pool: Rig) -> None:
    """Children share full blocks; the source of a copied tail is held until the copy's step has completed."""
    engine = pool.engine()
    parent = engine.admit(TOKENS)
    engine.forward(parent)
    (child,) = engine.fork(parent, 1)
    shared = named(engine, parent) & named(engine, child)
    assert len(shared) == len(TOKENS) // BLOCK
    engine.advance({child: 5})
    engine.forward(child)
    engine.finish(parent)
    with plan(engine, child):
        assert held(pool.servers[0], engine) == named(engine, child) >= shared
    engine.finish(child)
    engine.close()


def test_what_came_and_went_between_two_plans_is_not_stamped(pool: Rig) -> None:
    """Its blocks may have newer occupants of others by now, and that is no error."""
    engine, other = pool.engine(), pool.engine()
    short = engine.admit([1, 2, 3])
    blocks = named(engine, short)
    engine.finish(short)
    engine.session.run(engine.session.draft())
    sequences = [other.admit([50 + index] * 4 * BLOCK, read_cache=False) for index in range(15)]
    assert blocks < named(other, *sequences)
    other.forward(*sequences)
    other.finish(*sequences)
    long = engine.admit(TOKENS)
    engine.forward(long)
    assert held(pool.servers[0], engine) == named(engine, long)
    engine.finish(long)
    other.close()
    engine.close()


def test_a_newer_occupant_stops_the_launch(fresh: Rig) -> None:
    """The stamp is newer on one shard: nothing is stamped on any, nothing is launched, and it stays refused."""
    engine = fresh.engine()
    sequence = engine.admit(TOKENS)
    block = min(named(engine, sequence))
    pools = [server.state.holding.pool for server in fresh.servers if server.state.holding is not None]
    newer = np.uint64(engine.session.sequences.generations[sequence & 0xFFFF_FFFF, 0] + np.uint64(2))
    pools[1].stamps[block] = newer
    before = [each.stamps.copy() for each in pools]
    for _ in range(2):
        with pytest.raises(StaleGenerationError) as refused:
            engine.forward(sequence)
        assert refused.value.metadata["block_id"] == str(block)
        assert refused.value.metadata["shard"] == "1"
        assert [each.stamps.tolist() for each in pools] == [each.tolist() for each in before]
    assert engine.session.state.work.open_plans == 0
    kept = engine.admit([7, 7, 7])
    engine.finish(sequence)
    engine.forward(kept)
    assert pools[1].stamps[block] == newer
    engine.finish(kept)


def test_a_newer_control_plane_stops_the_launch(fresh: Rig) -> None:
    """A session that has not declared itself to it launches nothing. One that has is refused new blocks of the older
    incarnation after they were stamped; those stamped before are not."""
    engine = fresh.engine()
    old = engine.admit(TOKENS)
    engine.forward(old)
    new = engine.admit([5, 5, 5])
    holding = fresh.servers[1].state.holding
    assert holding is not None
    header = holding.pool.directory.header
    own = int(header["incarnation"][0])
    header["incarnation"][0] = own + 1
    for sequence in (old, new):
        with pytest.raises(LaunchPausedError) as paused:
            engine.forward(sequence)
        assert paused.value.metadata == {"incarnation": str(own + 1), "shard": "1"}
    engine.session.pool.incarnation = own + 1
    for _ in range(2):
        with pytest.raises(StaleEpochError) as refused:
            engine.forward(new)
        assert refused.value.metadata["shard"] == "1"
    engine.finish(new)
    engine.session.run(engine.session.draft())
    with plan(engine, old):
        pass
    header["incarnation"][0] = own
    engine.finish(old)


def test_nothing_is_launched_on_an_old_lease(pool: Rig) -> None:
    """Half the time to live after the last renewal; the next renewal lets it go on."""
    engine = pool.engine()
    sequence = engine.admit(TOKENS)
    lease = engine.session.state.lease
    with plan(engine, sequence, new=10) as opened:
        lease.renewed_at -= lease.ttl_seconds / 2
        with pytest.raises(LaunchPausedError):
            opened.run(0, *pool.oracle.rows(TOKENS, 0, 10, 0))
    with pytest.raises(LaunchPausedError):
        engine.forward(sequence)
    engine.session.run(engine.session.draft())
    engine.forward(sequence)
    engine.finish(sequence)
    engine.close()


def test_the_end_of_a_lease_stops_launches_and_is_drained(pool: Rig) -> None:
    """An open plan runs nothing any more; the shards are told only when it is closed, and then the blocks are back."""
    engine = pool.engine()
    sequence = engine.admit([31, 32, 33])
    opened = plan(engine, sequence, new=3)
    service, session_id = pool.service, engine.session.session_id
    hosted = service.server.plane.pools["default"]
    before = pool.stats()

    def end() -> None:
        end_session(hosted, hosted.sessions[session_id], SessionExpiredError("the lease ran out"))

    service.on_loop(end)
    rows = pool.oracle.rows([31, 32, 33], 0, 3, 0)

    def refused() -> bool:
        try:
            opened.run(0, *rows)
        except SessionExpiredError:
            return True
        return False

    wait_until(refused, "the process hears of it")
    assert sum(pool.stats()) == sum(before) > 0
    with pytest.raises(SessionExpiredError):
        plan(engine, sequence)
    assert session_id in hosted.sessions
    opened.close()
    wait_until(lambda: session_id not in hosted.sessions, "the drain is heard")
    wait_until(lambda: pool.stats() == (0, 0), "the blocks are back")
    engine.close()


def test_a_second_compute_access_takes_over(pool: Rig) -> None:
    """The session lives on: the next access holds what the tables name, with copies that were not run."""
    engine = pool.engine()
    parent = engine.admit(TOKENS)
    engine.forward(parent)
    (child,) = engine.fork(parent, 1)
    engine.compute.close()
    with pytest.raises(PreconditionError, match="closed"):
        plan(engine, parent)
    engine.compute = open_compute(engine.session)
    engine.advance({parent: 60, child: 61})
    engine.forward(parent, child)
    assert held(pool.servers[0], engine) >= named(engine, parent, child)
    engine.finish(parent, child)
    engine.session.run(engine.session.draft())
    engine.close()


def test_a_lost_pool_stops_launches(fresh: Rig) -> None:
    """The shards give the memory up under a new epoch; what is mapped stays mapped, and nothing is launched on it."""
    engine = fresh.engine()
    sequence = engine.admit(TOKENS)
    engine.forward(sequence)
    hosted = fresh.service.server.plane.pools["default"]
    fresh.service.on_loop(lambda: hosted.lose("a test says so"))

    def lost() -> bool:
        try:
            plan(engine, sequence).close()
        except PoolLostError:
            return True
        except LaunchPausedError:
            return False  # the shards follow a newer incarnation already
        return False

    wait_until(lost, "the process hears of it")


def test_an_asyncio_session(pool: Rig) -> None:
    """The same access for an `AsyncSession`."""

    async def work() -> None:
        async with await AsyncSession.open(address=pool.service.address, max_sequences=8) as session:
            step = session.draft()
            sequence = step.admit(TOKENS)
            await session.run(step)
            with (
                open_compute(session) as compute,
                compute.plan([sequence], [10], [10], num_query_heads=8) as opened,
            ):
                out = opened.run(0, *pool.oracle.rows(TOKENS, 0, 10, 0))
            assert_attention(out, pool.oracle.attention(TOKENS, 0, 10, 0))

    asyncio.run(work())


def test_arguments_are_checked_first(pool: Rig) -> None:
    engine = pool.engine()
    sequence = engine.admit(TOKENS)
    for arguments, error in (
        (([sequence], [1], [13]), InvalidArgumentError),
        (([sequence], [5], [4]), InvalidArgumentError),
        (([sequence, sequence], [1, 1], [4, 4]), InvalidArgumentError),
        (([sequence], [1, 1], [4]), InvalidArgumentError),
        (([sequence], [0.5], [4]), InvalidArgumentError),
        (([sequence + 1], [1], [4]), NotGrantedError),
        (([sequence + (1 << 32)], [1], [4]), NotGrantedError),
    ):
        with pytest.raises(error):
            engine.compute.plan(*arguments, num_query_heads=8)
    options: dict[str, Any]
    for options in (
        {"num_query_heads": 3},
        {"num_query_heads": 8, "soft_cap": -1.0},
        {"num_query_heads": 8, "window": 0},
    ):
        with pytest.raises(InvalidArgumentError):
            engine.compute.plan([sequence], [1], [4], **options)
    query, key, value = pool.oracle.rows(TOKENS, 0, 10, 0)
    with plan(engine, sequence, new=10) as opened:
        for layer, tensors in (
            (9, (query, key, value)),
            (0, (query[:3], key, value)),
            (0, (query[:, :4], key, value)),
            (0, (query, query, value)),
            (0, (query, key.to(torch.bfloat16), value)),
        ):
            with pytest.raises(InvalidArgumentError):
                opened.run(layer, *tensors)
    with pytest.raises(PreconditionError, match="closed"):
        opened.run(0, query, key, value)
    assert engine.session.state.work.open_plans == 0
    engine.finish(sequence)
    engine.close()


def test_windows_of_single_layers(pool: Rig) -> None:
    """Mixed layers: each has its own window, the others the plan's."""
    engine, oracle = pool.engine(), pool.oracle
    sequence = engine.admit(TOKENS)
    with engine.compute.plan([sequence], [10], [10], num_query_heads=8, window=7, windows={1: 3, 3: None}) as opened:
        for layer, window in enumerate((7, 3, 7, None)):
            out = opened.run(layer, *oracle.rows(TOKENS, 0, 10, layer))
            expected = oracle.attention(TOKENS, 0, 10, layer, window)
            torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    engine.finish(sequence)
    engine.close()


def test_a_closed_compute_access_holds_nothing(fresh: Rig) -> None:
    """The hold maps are empty, in memory that outlives shard and connection: a shard that is started again, to which
    nobody can say that the lease is drained, keeps no block for it."""
    engine = fresh.engine()
    engine.forward(engine.admit(TOKENS))
    assert all(held(server, engine) for server in fresh.servers)
    holding = fresh.servers[0].state.holding
    assert holding is not None
    (process,) = holding.processes.of_session(engine.session.session_id)
    bits = process.bits()
    engine.compute.close()
    assert not bits.any()
