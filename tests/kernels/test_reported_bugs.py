"""Bugs that were reported against other paged attention kernels, each as a test under its number.

The list is in docs/kernels.md. 1 and 2 are in test_huge_pools.py, 15 and 21 in the case matrix, 18 in
test_blocks.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernel_cases import MATRIX, Case, build, pool_tensors
from kernel_oracle import assert_as_good_as_torch
from kvplane import kernels
from kvplane.kernels import DtypeError, PagedKv, ShapeError, TableError, UnsupportedFeatureError, reference

MIXED = next(case for case in MATRIX if case.name == "mixed")


def test_03_nan_in_unwritten_slots_never_reaches_the_output() -> None:
    for case in (Case("decode", ((3, 1), (17, 1))), Case("chunk", ((19, 19), (70, 30)))):
        batch = build(case)
        assert any(pool.isnan().any() for pool in batch.pools)
        out, lse = batch.attend()
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_03_nan_in_a_key_one_reads_is_not_hidden() -> None:
    batch = build(Case("nan", ((20, 1), (20, 1), (40, 40))))
    for block in (batch.tables[0, 0], batch.tables[2, 2]):
        batch.layer.keys[0][int(block), :, 2] = torch.nan
    out, lse = batch.attend()
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()
    assert out[2:36].isfinite().all(), "rows before the broken token do not see it"
    assert out[36:].isnan().all()


@pytest.mark.parametrize("group", [1, 4])
def test_03_nan_in_a_value_later_in_the_chunk_is_not_seen_before(group: int) -> None:
    batch = build(Case("nan", ((40, 4), (90, 60)), group=group))
    batch.layer.values[0][int(batch.tables[0, 2]), :, 6] = torch.nan  # token 38
    batch.layer.values[0][int(batch.tables[1, 4]), :, 6] = torch.nan  # token 70
    out, _ = batch.attend()
    assert out[:2].isfinite().all()
    assert out[2:4].isnan().all()
    assert out[4 : 4 + 40].isfinite().all()
    assert out[4 + 40 :].isnan().all()


def test_04_padding_rows_write_nowhere() -> None:
    layer, pools = pool_tensors(Case("padding", ()), 4, fill=0.0)
    plan = kernels.plan(layer.geometry, [[1], [2]], [0, 3], [2, 1], num_query_heads=2, padding_tokens=2)
    rows = torch.full((5, 2, 64), torch.nan)
    rows[2] = 1
    kernels.write(plan, rows, rows, layer)
    assert plan.slots.tolist() == [-1, -1, 34, -1, -1]
    assert all(pool.isfinite().all() and pool.count_nonzero() == 128 for pool in pools)


def test_05_06_empty_sequences_and_padding_rows_are_defined() -> None:
    batch = build(Case("empty", ((0, 1), (9, 2), (0, 3), (0, 0)), padding_tokens=4))
    out, lse = batch.attend()
    empty = torch.tensor([True, False, False, *[True] * 7])
    assert not out[empty].any()
    assert (lse[empty] == -torch.inf).all()
    assert lse[~empty].isfinite().all()


def test_06_a_batch_of_nothing() -> None:
    layer, _ = pool_tensors(Case("nothing", ()), 2)
    for tables, lengths in (([[1]], [0]), (np.empty((0, 3), np.int64), [])):
        plan = kernels.plan(layer.geometry, tables, lengths, num_query_heads=4)
        out, lse = kernels.attend(plan, torch.zeros(len(lengths), 4, 64), layer)
        assert out.shape == (len(lengths), 4, 64)
        assert not out.any()
        assert (lse == -torch.inf).all()


def test_07_merging_two_empty_states() -> None:
    nothing, empty = torch.full((2, 3, 16), torch.nan), torch.full((2, 3), -torch.inf)
    out, lse = kernels.merge_states(nothing, empty, nothing, empty)
    assert not out.any()
    assert (lse == -torch.inf).all()
    some, some_lse = torch.randn(2, 3, 16), torch.randn(2, 3)
    for state in (
        kernels.merge_states(some, some_lse, nothing, empty),
        kernels.merge_states(nothing, empty, some, some_lse),
    ):
        assert torch.equal(state[0], some)
        assert torch.equal(state[1], some_lse)


def test_07_merging_is_associative_and_right_for_far_apart_states() -> None:
    states = [(torch.randn(4, 2, 16).double(), 200 * torch.randn(4, 2).double()) for _ in range(3)]
    a, b, c = ((out.float(), lse.float()) for out, lse in states)
    left = kernels.merge_states(*kernels.merge_states(*a, *b), *c)
    right = kernels.merge_states(*a, *kernels.merge_states(*b, *c))
    weights = torch.softmax(torch.stack([lse for _, lse in states]), 0)[..., None]
    expected = (weights * torch.stack([out for out, _ in states])).sum(0)
    for out, _ in (left, right):
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_08_merging_in_place() -> None:
    a, b = (torch.randn(4, 2, 16), torch.randn(4, 2)), (torch.randn(4, 2, 16), torch.randn(4, 2))
    expected = kernels.merge_states(*a, *b)
    for place in (a, b):
        copies = [(out.clone(), lse.clone()) for out, lse in (a, b)]
        target = copies[0] if place is a else copies[1]
        kernels.merge_states(*copies[0], *copies[1], out=target[0], lse=target[1])
        assert torch.equal(target[0], expected[0])
        assert torch.equal(target[1], expected[1])


@pytest.mark.parametrize("queries", [1, 3, 30])
def test_09_window_starts_at_every_place_in_a_tile(queries: int) -> None:
    """A window of W is W keys, the token itself included; equal to a dense mask for each start in a tile."""
    for window in (*range(1, 20), *range(60, 70), 128, 129):
        batch = build(Case("window", ((150, queries),), window=window, head_dim=16, kv_heads=1))
        assert_as_good_as_torch(batch, *batch.attend())


def test_10_scales_belong_to_quantised_caches() -> None:
    _, pools = pool_tensors(Case("features", ()), 4, fill=0.0)
    with pytest.raises(DtypeError, match="key_scale"):
        PagedKv.of(pools[0], pools[1], key_scale=torch.ones(1))
    small = [pool.to(torch.int8) for pool in pools]
    for bad in (torch.ones(3), torch.ones(2, 1), torch.tensor([1.0, 0.0]), torch.tensor([1.0, torch.inf])):
        with pytest.raises(ShapeError, match="value_scale"):
            PagedKv.of(small[0], small[1], value_scale=bad)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_10_writing_and_reading_back_through_scales(dtype: torch.dtype) -> None:
    """Each head's own scale, keys' apart from values', is used on the way in and on the way out."""
    case = Case("scales", ((20, 20),), dtype, scales="heads", query_dtype=torch.float32)
    written, expected = build(case), build(case)
    plan = written.plan()
    key, value = (torch.randn(20, 2, 64) * torch.tensor([1.0, 30.0])[:, None] for _ in range(2))
    kernels.write(plan, key, value, written.layer)
    reference.write(plan, key, value, expected.layer)
    for got, want in zip(written.pools, expected.pools, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert written.layer.value_scale is not None
    out, _ = kernels.attend(plan, torch.zeros(20, 8, 64), written.layer)
    stored = written.layer.values[0][int(written.tables[0, 0]), :, 0].float() * written.layer.value_scale[:, None]
    torch.testing.assert_close(out[0], stored.repeat_interleave(4, 0), rtol=1e-5, atol=1e-6)


def test_22_tree_masks_are_refused_not_ignored() -> None:
    layer, _ = pool_tensors(Case("features", ()), 4, fill=0.0)
    with pytest.raises(UnsupportedFeatureError, match="tree_mask"):
        kernels.plan(layer.geometry, [[1]], [1], num_query_heads=2, tree_mask=torch.ones(2))


@pytest.mark.parametrize("tokens", [20, 1100])
def test_16_a_sink_counts_once_however_many_splits_there_are(tokens: int) -> None:
    """One sink as large as all scores together halves the output; an infinite one takes it all."""
    batch = build(Case("sinks", ((tokens, 1),), kv_heads=1, group=3))
    out, lse = kernels.attend(batch.plan(), batch.query, batch.layer)
    sinks = lse[0].clone()
    sinks[2] = 1e30
    plan = kernels.plan(batch.layer.geometry, batch.tables, [tokens], num_query_heads=3, sinks=sinks)
    halved, halved_lse = kernels.attend(plan, batch.query, batch.layer)
    torch.testing.assert_close(halved[:, :2], out[:, :2] / 2, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(halved_lse[:, :2], lse[:, :2] + np.log(2).astype(np.float32), rtol=0, atol=4e-6)
    assert not halved[:, 2].any()


def test_11_keys_and_values_of_unequal_strides() -> None:
    batch = build(MIXED)
    expected, _ = batch.attend()
    key, value = batch.layer.keys[0], batch.layer.values[0]
    blocks, heads, size, dim = key.shape
    wide = torch.full((blocks, heads, size, 3, dim), torch.nan)
    wide[:, :, :, 1] = key
    turned = torch.full((heads, 2, blocks, size, dim), torch.nan)
    turned[:, 1] = value.transpose(0, 1)
    layer = PagedKv.of(wide[:, :, :, 1], turned[:, 1].transpose(0, 1))
    assert torch.equal(replace(batch, layer=layer).attend()[0], expected)


def test_12_scattered_and_repeated_blocks() -> None:
    batch = build(Case("scattered", ((64, 1), (64, 1))))
    tables = batch.tables.copy()
    tables[1, :4] = tables[0, [2, 0, 2, 1]]
    again = replace(batch, tables=tables)
    plan = kernels.plan(batch.layer.geometry, tables, [64, 64], num_query_heads=8, slots=[-1, -1])
    out, _ = kernels.attend(plan, batch.query, batch.layer)
    repeated = torch.cat([again.layer.keys[0][int(i)] for i in tables[1, :4]], 1)
    values = torch.cat([again.layer.values[0][int(i)] for i in tables[1, :4]], 1)
    scores = torch.einsum("hgd,htd->hgt", batch.query[1].view(2, 4, 64), repeated) / 8
    expected = torch.einsum("hgt,htd->hgd", torch.softmax(scores, 2), values)
    torch.testing.assert_close(out[1].view(2, 4, 64), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_13_a_length_that_is_a_multiple_of_the_block(spare: int) -> None:
    batch = build(Case("multiple", ((16, 1), (512, 1), (64, 64), (1024, 16)), spare_entries=spare))
    assert_as_good_as_torch(batch, *batch.attend())


def test_14_out_of_range_tables_never_reach_a_kernel() -> None:
    layer, _ = pool_tensors(Case("range", ()), 4)
    for entry in (-1, 0, 4, 1 << 16, 1 << 31, 1 << 40):
        with pytest.raises(TableError, match=r"entry 1 of sequence 0 is .*, allowed is 1\.\.3"):
            kernels.plan(layer.geometry, [[1, entry]], [17], num_query_heads=2)
    with pytest.raises(TableError, match="sequence 1 of 17 tokens needs 2 blocks, its table has 1"):
        kernels.plan(layer.geometry, [[1], [2]], [16, 17], num_query_heads=2)


def test_17_batch_mates_do_not_matter() -> None:
    batch = build(Case("mates", ((1000, 1), (33, 33), (1, 1), (2000, 1)), dtype=torch.bfloat16))
    out, _ = batch.attend()
    alone, _ = kernels.attend(batch.plan_of(range(3, 4)), batch.query[-1:], batch.layer)
    assert torch.equal(alone, out[-1:])


def test_19_a_copy_is_complete_when_it_returns() -> None:
    layer, (keys, values) = pool_tensors(Case("copy", ()), 400, fill=1.0)
    kernels.copy_blocks(layer, range(1, 200), range(200, 399))
    keys[:200], values[:200] = 2, 2
    assert (keys[200:] == 1).all()
    assert (values[200:] == 1).all()


def test_20_more_rows_than_slots() -> None:
    layer, (keys, _) = pool_tensors(Case("rows", ()), 3, fill=0.0)
    plan = kernels.plan(layer.geometry, [[1]], [2], [2], num_query_heads=2)
    rows = torch.ones(7, 2, 64)
    kernels.write(plan, rows, rows, layer)
    assert keys.count_nonzero() == 2 * 2 * 64


def test_23_many_splits_do_not_lose_precision() -> None:
    """Partial results are float32: 20 splits of bfloat16 keys are as exact as one."""
    batch = build(Case("splits", ((10_000, 1),), dtype=torch.bfloat16, kv_heads=1, group=2))
    query = batch.query.float()
    plan = batch.plan()
    out, _ = kernels.attend(plan, query, batch.layer)
    expected, _ = reference.attend(plan, query, batch.layer)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)


def test_24_tensors_that_begin_inside_an_allocation() -> None:
    memory = torch.full((1 << 16,), torch.nan)
    part = memory[1000 * 16 : 1000 * 16 + 2 * 5 * 2 * 16 * 16].view(2, 5, 2, 16, 16)
    layer = PagedKv.of(part[0], part[1])
    plan = kernels.plan(layer.geometry, [[3, 2]], [20], [20], num_query_heads=2)
    rows = torch.randn(20, 2, 16)
    kernels.write(plan, rows, rows, layer)
    out, _ = kernels.attend(plan, rows, layer)
    assert torch.equal(out[0], rows[0]), "the first token sees itself only"
    assert memory.isfinite().sum() == 2 * 20 * 2 * 16
