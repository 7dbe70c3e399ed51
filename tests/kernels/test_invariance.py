"""What must not change a bit of the result: batch-mates, block ids, threads, layouts, neighbours in time."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernel_cases import MATRIX, Case, build
from kernel_oracle import assert_as_good_as_torch
from kvplane import kernels
from kvplane.kernels import Layout, PagedKv, get_num_threads, reference, set_num_threads

MIXED = next(case for case in MATRIX if case.name == "mixed")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_alone_equals_in_a_batch(dtype: torch.dtype, window: int | None) -> None:
    batch = build(replace(MIXED, dtype=dtype, window=window, padding_tokens=0))
    out, lse = batch.attend()
    row = 0
    for b, (_, queries) in enumerate(batch.case.sequences):
        rows = slice(row, row + queries)
        alone, alone_lse = kernels.attend(batch.plan_of(range(b, b + 1)), batch.query[rows], batch.layer)
        assert torch.equal(alone, out[rows])
        assert torch.equal(alone_lse, lse[rows])
        row += queries


def test_split_of_a_large_batch_equals_the_whole() -> None:
    case = Case("large", tuple((1 + 97 * b % 1500, 1) for b in range(40)), dtype=torch.bfloat16, group=3)
    batch = build(case)
    out, _ = batch.attend()
    halves = [
        kernels.attend(batch.plan_of(r), batch.query[r.start : r.stop], batch.layer)[0]
        for r in (range(17), range(17, 40))
    ]
    assert torch.equal(torch.cat(halves), out)


def test_renumbered_blocks_give_the_same_bits() -> None:
    batch = build(MIXED)
    out, lse = batch.attend()
    keys, values = batch.layer.keys[0], batch.layer.values[0]
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(keys.shape[0] - 1)])
    moved = PagedKv.of(torch.empty_like(keys), torch.empty_like(values))
    moved.keys[0][order], moved.values[0][order] = keys, values
    known = (batch.tables > 0) & (batch.tables < keys.shape[0])
    tables = np.where(known, order.numpy()[np.where(known, batch.tables, 0)], batch.tables)
    again = replace(batch, layer=moved, tables=tables).attend()
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_layouts_and_segments_give_the_same_bits() -> None:
    out, _ = build(MIXED).attend()
    for layout in Layout:
        for interleaved in (False, True):
            for segments in (1, 3):
                case = replace(MIXED, layout=layout, interleaved=interleaved, segments=segments)
                assert torch.equal(build(case).attend()[0], out)


def test_threads_do_not_change_the_result() -> None:
    batch = build(replace(MIXED, sequences=((5000, 1), (3000, 120), (900, 1)), kv_heads=4, head_dim=128))
    before = get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            set_num_threads(threads)
            results.append(batch.attend()[0])
    finally:
        set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_concurrent_callers_of_own_and_shared_plans() -> None:
    batches = [build(replace(MIXED, sequences=((3000, 1), (700 + b, 30))), seed=b) for b in range(4)]
    expected = [batch.attend()[0] for batch in batches]
    plans = [batch.plan() for batch in batches]

    def call(i: int) -> bool:
        b = i % len(batches)
        return torch.equal(kernels.attend(plans[b], batches[b].query, batches[b].layer)[0], expected[b])

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(call, range(64)))


def test_a_plan_serves_every_layer_of_its_group() -> None:
    first, second = build(MIXED, 1), build(MIXED, 1)
    for pool in second.pools:
        pool.mul_(2)
    plan = first.plan()
    for batch in (first, second, first):
        out, lse = kernels.attend(plan, batch.query, batch.layer)
        assert_as_good_as_torch(batch, out, lse)


def test_the_arguments_of_a_plan_are_copied() -> None:
    batch = build(MIXED)
    expected, _ = batch.attend()
    tables = batch.tables.copy()
    plan = replace(batch, tables=tables).plan()
    tables[:] = 1
    assert torch.equal(kernels.attend(plan, batch.query, batch.layer)[0], expected)


def test_cascade_equals_flat_within_rounding() -> None:
    case = Case("cascade", ((4200, 1),) * 9, shared_prefix_tokens=4096, head_dim=128)
    batch = build(case)
    cascade, cascade_lse = batch.attend()
    flat, flat_lse = replace(batch, case=replace(case, shared_prefix_tokens=0)).attend()
    torch.testing.assert_close(cascade, flat, rtol=0, atol=1e-6)
    torch.testing.assert_close(cascade_lse, flat_lse, rtol=0, atol=4e-6)


def test_prefix_and_suffix_merge_to_the_whole() -> None:
    whole = build(Case("whole", ((700, 1), (650, 1)), window=None))
    out, lse = whole.attend()
    plan = kernels.plan(whole.layer.geometry, whole.tables, [512, 512], num_query_heads=8)
    prefix = kernels.attend(plan, whole.query, whole.layer)
    plan = kernels.plan(whole.layer.geometry, whole.tables[:, 32:], [188, 138], num_query_heads=8)
    suffix = kernels.attend(plan, whole.query, whole.layer)
    merged, merged_lse = kernels.merge_states(*prefix, *suffix)
    torch.testing.assert_close(merged, out, rtol=0, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=2e-6)


def test_strided_queries_and_outputs() -> None:
    batch = build(MIXED)
    expected, expected_lse = batch.attend()
    rows, heads, dim = batch.query.shape
    query = torch.full((heads, rows, 3 * dim), torch.nan)[:, :, dim : 2 * dim].transpose(0, 1)
    query.copy_(batch.query)
    frame = torch.full((rows, heads, 2 * dim), 7.0)
    lse = torch.full((heads, rows), torch.nan).T
    kernels.attend(batch.plan(), query, batch.layer, out=frame[..., :dim], lse=lse)
    assert torch.equal(frame[..., :dim], expected)
    assert torch.equal(lse, expected_lse)
    assert (frame[..., dim:] == 7).all()


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_queries_of_another_dtype_than_the_cache(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    batch = build(replace(MIXED, dtype=cache_dtype))
    query = batch.query.to(query_dtype)
    out, _ = kernels.attend(batch.plan(), query, batch.layer)
    expected, _ = reference.attend(batch.plan(), query, batch.layer)
    assert out.dtype == query_dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6 if query_dtype == torch.float32 else 2e-2)
