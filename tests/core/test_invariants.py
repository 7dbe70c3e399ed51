"""I1 to I5 of the design, named, in the smallest scenario that would break each: blocks, prefixes, forks."""

import numpy as np
import pytest

from core_driver import (
    Engine,
    free_list,
    model,
    pack,
    published,
    references,
    small_core,
    u32,
    u64,
)
from kvplane.cache.core import (
    Lengths,
    Observe,
    Reason,
    TransferAck,
)
from kvplane.wire.digests import block_digest
from kvplane.wire.errors import (
    InternalError,
    InvalidArgumentError,
)
from kvplane.wire.identity import Namespace, root_digest


def test_i1_check_integrity_notices_a_wrong_count() -> None:
    core = small_core(11)
    engine = Engine(core)
    engine.admit([1] * 40)
    core.state.columns.references[1] += 1
    with pytest.raises(InternalError, match="I1"):
        core.check_integrity()


def test_i1_the_states_add_up_at_every_moment() -> None:
    core = small_core(11)
    engine = Engine(core, settles=False)
    engine.admit([1] * 40)
    other = engine.admit([2] * 40)
    engine.finish(other)
    statistics = core.statistics()
    assert statistics.free + statistics.cached + statistics.held + statistics.quarantined == 10
    # Two full blocks of the finished one are pinned by their seals, its tail is free.
    assert (statistics.held, statistics.free) == (5, 5)
    engine.settle()
    assert core.statistics().cached == 2


def test_i2_a_block_gets_a_new_generation_with_each_occupant() -> None:
    core = small_core(3, incarnation=7)
    engine = Engine(core)
    first = engine.admit([1] * 20)
    assert engine.generations[first] == [(7 << 32) + 1] * 2
    engine.finish(first)
    second = engine.admit([2] * 20)
    assert engine.generations[second] == [(7 << 32) + 2] * 2


def test_i2_a_block_whose_generations_are_used_up_is_retired() -> None:
    core = small_core(4)
    core.state.columns.generation[1] = (1 << 32) + 0xFFFF_FFFE
    engine = Engine(core)
    sequence = engine.admit([1] * 20)
    assert engine.generations[sequence][0] == (1 << 32) + 0xFFFF_FFFF
    engine.finish(sequence)
    assert core.state.pool.retired == {1}
    assert 1 not in free_list(core)
    assert 1 not in engine.tables.get(engine.admit([2] * 20), [])
    with pytest.raises(InvalidArgumentError, match="never fit a pool of 2"):
        engine.ask([3] * 40)


def test_i3_nothing_is_hit_before_its_seal_is_acknowledged() -> None:
    core = small_core(30)
    engine = Engine(core, settles=False)
    writer = engine.admit([1] * 40, committed=False)
    waiter, admission = engine.ask([1] * 40)
    assert admission is None
    engine.commit(writer, 40)
    assert engine.ask_again(waiter) is None
    batch = core.take_seals()
    assert batch is not None
    assert batch.block_ids.tolist() == [1, 2]
    assert batch.depths.tolist() == [0, 1]
    assert batch.generations.tolist() == engine.generations[writer][:2]
    root = root_digest(model(), Namespace(), 0)
    first = block_digest(root, pack([1] * 16))
    assert batch.digests == first + block_digest(first, pack([1] * 16))
    assert batch.parent_digests == root + first
    assert engine.ask_again(waiter) is None
    core.acknowledge_seals(batch.seal_id)
    admission = engine.ask_again(waiter)
    assert admission is not None
    assert admission.cached_tokens == 32
    with pytest.raises(InvalidArgumentError, match="seal_id"):
        core.acknowledge_seals(batch.seal_id)


def test_i3_a_block_that_a_shard_could_not_seal_is_not_published_and_nor_is_its_child() -> None:
    core = small_core(30)
    engine = Engine(core, settles=False)
    engine.admit([1] * 64)
    batch = core.take_seals()
    assert batch is not None
    core.acknowledge_seals(batch.seal_id, np.array([True, False, True, True]))
    core.check_integrity()
    assert published(core, [1, 2, 3, 4]) == [True, False, False, False]
    _, admission = engine.ask([1] * 64)
    assert admission is not None
    assert admission.cached_tokens == 16


def test_i3_a_finished_writers_seals_are_still_published() -> None:
    core = small_core(30)
    engine = Engine(core, settles=False)
    engine.finish(engine.admit([1] * 40))
    assert core.statistics().held == 2
    engine.settle()
    assert core.statistics().cached == 2
    assert engine.ask([1] * 40)[1] is not None


def test_i4_only_leaves_go_even_if_a_child_was_sealed_long_after_its_parent() -> None:
    core = small_core(4)
    engine = Engine(core, settles=False)
    sequence = engine.admit([1] * 31)
    first = core.take_seals()
    engine.step(observe=Observe(u64(sequence), u32(1), u32(1)), extend=Lengths(u64(sequence), u32(32)))
    engine.commit(sequence, 32)
    engine.finish(sequence)
    second = core.take_seals()
    assert first is not None
    assert second is not None
    core.acknowledge_seals(first.seal_id)
    core.acknowledge_seals(second.seal_id)
    core.check_integrity()
    assert free_list(core) == [3, 1, 2]
    other = engine.admit([2] * 20)
    # Block 1 was released first and has a child: its child goes, and it stays.
    assert engine.tables[other] == [3, 2]
    assert published(core, [1, 2]) == [True, False]


def test_i4_identical_blocks_have_one_canonical_and_its_chain_stays() -> None:
    core = small_core(21)
    engine = Engine(core)
    # Neither may read, so both write; the second one's child hangs below the first one's block.
    first = engine.admit([1] * 20, read_cache=False)
    second = engine.admit([1] * 40, read_cache=False)
    engine.finish(first)
    assert published(core, engine.tables[second]) == [False, True, False]
    assert core.statistics().cached == 0
    engine.finish(second)
    assert core.statistics().cached == 2
    assert engine.ask([1] * 40)[1] is not None


def test_i5_a_fork_shares_full_blocks_and_copies_the_tail() -> None:
    core = small_core(21)
    engine = Engine(core)
    parent = engine.admit([1] * 40)
    one, two = engine.fork(parent, 2)
    assert engine.result is not None
    copies = engine.result.copies
    assert engine.tables[one][:2] == engine.tables[two][:2] == engine.tables[parent][:2]
    # Three tables and two pins on the shared blocks, one table and two pins on the parent's tail.
    assert references(core, engine.tables[parent]) == [5, 5, 3]
    assert [(copy.source_id, copy.num_slots) for copy in copies] == [(engine.tables[parent][2], 8)] * 2
    assert [copy.destination_id for copy in copies] == [engine.tables[one][2], engine.tables[two][2]]
    engine.finish(parent)
    # The source outlives its owner until both copies have run.
    assert references(core, [copies[0].source_id]) == [2]
    engine.step(transfers=tuple(TransferAck(copy.op_id) for copy in copies))
    assert references(core, [copies[0].source_id]) == [0]
    engine.decode(one, [7] * 10)
    engine.decode(two, [8] * 10)
    assert published(core, [engine.tables[one][2], engine.tables[two][2]]) == [True, True]
    engine.finish(one, two)


def test_i5_a_child_whose_copy_failed_is_computed_again() -> None:
    core = small_core(21)
    engine = Engine(core)
    parent = engine.admit([1] * 40)
    (child,) = engine.fork(parent)
    assert engine.result is not None
    (copy,) = engine.result.copies
    result = engine.step(transfers=(TransferAck(copy.op_id, succeeded=False),), extend=Lengths(u64(child), u32(50)))
    assert result.states[0].reason == Reason.COPY_FAILED
    assert [each.sequence_id for each in result.skipped] == [child]
    admission = engine.ask_again(child)
    assert admission is not None
    assert admission.cached_tokens == 32


def test_i5_a_fork_that_does_not_fit_waits_with_its_parents_tokens() -> None:
    core = small_core(4)
    engine = Engine(core)
    parent = engine.admit([1] * 40)
    (child,) = engine.fork(parent)
    assert engine.result is not None
    assert engine.result.states[-1].reason == Reason.NO_SPACE
    engine.finish(parent)
    admission = engine.ask_again(child)
    assert admission is not None
    assert (admission.cached_tokens, admission.num_slots) == (32, 40)


def test_i5_a_fork_at_a_block_boundary_copies_nothing() -> None:
    core = small_core(4)
    engine = Engine(core)
    parent = engine.admit([1] * 32)
    (child,) = engine.fork(parent)
    assert engine.result is not None
    assert engine.result.copies == ()
    assert engine.tables[child] == engine.tables[parent]
