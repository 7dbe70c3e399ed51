"""Writing keys and values: exact bytes at the slots, not a byte anywhere else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_cases import MATRIX, Case, build, pool_tensors
from kvplane import kernels
from kvplane.kernels import AttentionPlan, Layout, PagedKv, reference

MIXED = next(case for case in MATRIX if case.name == "mixed")


def as_bytes(pools: tuple[Tensor, ...]) -> list[Tensor]:
    return [pool.view(torch.uint8).clone() for pool in pools]


def rows_of(plan: AttentionPlan, dtype: torch.dtype, extra: int = 0) -> tuple[Tensor, Tensor]:
    shape = (plan.num_tokens + extra, plan.geometry.num_kv_heads, plan.geometry.head_dim)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [1, 3])
def test_bytes_at_the_slots_and_nowhere_else(
    layout: Layout, interleaved: bool, dtype: torch.dtype, segments: int
) -> None:
    case = replace(MIXED, layout=layout, interleaved=interleaved, dtype=dtype, segments=segments)
    written, expected = build(case), build(case)
    plan = written.plan()
    key, value = rows_of(plan, dtype)
    kernels.write(plan, key, value, written.layer)
    reference.write(plan, key, value, expected.layer)
    for got, want in zip(as_bytes(written.pools), as_bytes(expected.pools), strict=True):
        assert torch.equal(got, want)


def test_canaries_around_a_pool_survive() -> None:
    case = Case("canary", ((40, 40),))
    memory = torch.full((2, 3 * 12 * 2 * 16 * 64), 7.5)
    key, value = (part[12 * 2048 : 24 * 2048].view(12, 2, 16, 64) for part in memory)
    layer = PagedKv.of(key, value)
    plan = kernels.plan(layer.geometry, [[9, 11, 1]], [48], [48], num_query_heads=8)
    kernels.write(plan, *rows_of(plan, case.dtype), layer)
    changed = (memory != 7.5).view(2, 36, 2048)
    assert changed[:, [12 + 9, 12 + 11, 12 + 1]].all()
    assert changed.sum() == 2 * 3 * 2048


def test_a_long_write_by_several_threads() -> None:
    case = Case("long", ((4000, 3000), (700, 700)), kv_heads=4, head_dim=128, layout=Layout.NHD)
    written, expected = build(case), build(case)
    plan = written.plan()
    key, value = rows_of(plan, case.dtype)
    kernels.write(plan, key, value, written.layer)
    reference.write(plan, key, value, expected.layer)
    for got, want in zip(as_bytes(written.pools), as_bytes(expected.pools), strict=True):
        assert torch.equal(got, want)


def test_strided_rows() -> None:
    case = replace(MIXED, sequences=((30, 30),))
    written, expected = build(case), build(case)
    plan = written.plan()
    packed = torch.randn(plan.num_tokens, 12, 64)
    kernels.write(plan, packed[:, 8:10], packed[:, 10:], written.layer)
    reference.write(plan, packed[:, 8:10], packed[:, 10:], expected.layer)
    for got, want in zip(as_bytes(written.pools), as_bytes(expected.pools), strict=True):
        assert torch.equal(got, want)


def test_own_slots() -> None:
    layer, _ = pool_tensors(Case("slots", ()), 8, fill=0.0)
    plan = kernels.plan(
        layer.geometry,
        np.empty((0, 0), np.int64),
        [],
        num_query_heads=8,
        padding_tokens=3,
        slots=[40, -1, 127],
    )
    key, value = rows_of(plan, torch.float32)
    kernels.write(plan, key, value, layer)
    assert torch.equal(layer.keys[0][2, :, 8], key[0])
    assert torch.equal(layer.values[0][7, :, 15], value[2])
    assert layer.keys[0].count_nonzero() == 2 * key[0].numel()


def test_write_then_attend_sees_the_new_tokens() -> None:
    batch = build(replace(MIXED, sequences=((100, 4), (20, 20)), padding_tokens=0))
    plan = batch.plan()
    key, value = rows_of(plan, torch.float32)
    kernels.write(plan, key, value, batch.layer)
    got, _ = kernels.attend(plan, batch.query, batch.layer)
    expected, _ = reference.attend(plan, batch.query, batch.layer)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
