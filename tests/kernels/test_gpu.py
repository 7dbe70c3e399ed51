"""On a CUDA device: every case whose launch is in the table, block operations, graphs and streams. `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from kernel_cases import ALL, Case, build
from kernel_oracle import assert_as_good_as_torch
from kvplane import kernels
from kvplane.kernels.cuda import launch_table
from kvplane.kernels.cuda.runtime import capability, why_not
from kvplane.kernels.cuda.work import refill

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CASES = tuple(
    replace(case, name=f"{case.name}, {str(dtype).removeprefix('torch.')}", dtype=dtype)
    for case in ALL
    for dtype in ((case.dtype, torch.bfloat16) if case.dtype == torch.float32 else (case.dtype,))
    if (dtype, dtype, case.head_dim) in launch_table.ATTEND
)


@pytest.fixture(autouse=True)
def _device() -> None:
    reason = why_not()
    if reason is not None:
        pytest.fail(f"no device: {reason}")


def test_most_of_the_list_is_in_the_launch_table() -> None:
    assert len(CASES) > len(ALL)
    assert (capability(CUDA) or 0) >= launch_table.LOWEST_CAPABILITY


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matrix(case: Case) -> None:
    batch = build(case)
    out, lse = batch.on(CUDA).attend()
    assert_as_good_as_torch(batch, out.cpu(), lse.cpu())


def test_alone_equals_in_a_batch() -> None:
    batch = build(Case("mates", ((1000, 1), (33, 33), (1, 1), (2000, 1)), dtype=torch.bfloat16)).on(CUDA)
    out, _ = batch.attend()
    alone, _ = kernels.attend(batch.plan_of(range(3, 4)), batch.query[-1:], batch.layer)
    assert torch.equal(alone, out[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_and_block_operations_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    case = Case("bytes", ((300, 40), (20, 20)), dtype, segments=3, interleaved=True)
    host = build(case)
    device = host.on(CUDA)
    shape = (60, case.kv_heads, case.head_dim)
    key, value = (torch.randn(shape).to(dtype) for _ in range(2))
    for batch, rows in ((host, (key, value)), (device, (key.to(CUDA), value.to(CUDA)))):
        kernels.write(batch.plan(), *rows, batch.layer)
        kernels.copy_blocks(batch.layer, [1, 2, 3], [2, 3, 1])
        kernels.copy_blocks(batch.layer, [1], [4])
        kernels.zero_blocks(batch.layer, [5])
        parts = kernels.gather_blocks(batch.layer, [1, 6])
        kernels.scatter_blocks(batch.layer, [7, 8], *parts)
    for mine, theirs in zip(device.pools, host.pools, strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))
    blocks = range(host.layer.geometry.num_blocks)
    sums = [kernels.checksum_blocks(batch.layer, blocks) for batch in (device, host)]
    assert (sums[0] == sums[1]).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_caches(dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn and (capability(CUDA) or 0) < launch_table.E4M3_CAPABILITY:
        with pytest.raises(kernels.UnsupportedFeatureError, match="capability"):
            build(Case("old device", ((20, 20),), dtype)).on(CUDA)
        return
    case = Case("quantised", ((300, 40), (700, 1)), dtype, scales="heads", query_dtype=torch.bfloat16)
    host = build(case)
    device = host.on(CUDA)
    out, lse = device.attend()
    assert_as_good_as_torch(host, out.cpu(), lse.cpu())
    key, value = ((torch.randn(41, case.kv_heads, case.head_dim) * 300).to(torch.bfloat16) for _ in range(2))
    kernels.write(host.plan(), key, value, host.layer)
    kernels.write(device.plan(), key.to(CUDA), value.to(CUDA), device.layer)
    for mine, theirs in zip(device.pools, host.pools, strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))


def test_a_captured_graph_takes_other_batches() -> None:
    largest = build(Case("largest", ((300, 1),) * 4, torch.bfloat16)).on(CUDA)
    captured = largest.plan()
    query, out = largest.query.clone(), torch.empty_like(largest.query)
    lse = torch.empty(query.shape[:2], device=CUDA)
    kernels.attend(captured, query, largest.layer, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.attend(captured, query, largest.layer, out=out, lse=lse)
    for lengths in ((300, 17, 1, 256), (5, 300, 40, 16)):
        case = replace(largest.case, sequences=tuple((length, 1) for length in lengths))
        batch = replace(largest, case=case)
        refill(captured, batch.plan())
        graph.replay()
        assert torch.equal(out, kernels.attend(batch.plan(), query, batch.layer)[0])


def test_attend_waits_for_nothing() -> None:
    batch = build(Case("quiet", ((300, 1), (70, 40)), torch.bfloat16)).on(CUDA)
    plan = batch.plan()
    kernels.attend(plan, batch.query, batch.layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.attend(plan, batch.query, batch.layer)
        batch.plan()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_pool_beyond_31_bits_of_elements() -> None:
    blocks = (1 << 31) // (16 * 64) + 3
    keys, values = (torch.empty(blocks, 1, 16, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    layer = kernels.PagedKv.of(keys, values)
    plan = kernels.plan(layer.geometry, [[blocks - 1, blocks - 2]], [20], [20], num_query_heads=1)
    key, value = (torch.randn(20, 1, 64, device=CUDA).to(torch.bfloat16) for _ in range(2))
    kernels.write(plan, key, value, layer)
    assert torch.equal(keys[blocks - 1, 0], key[:16, 0])
    out, _ = kernels.attend(plan, key, layer)
    assert torch.equal(out[0], value[0])
