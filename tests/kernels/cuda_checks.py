"""The CUDA backend's own kernels on host memory. Run by test_cuda_emulated.py, in a process of its own."""

import itertools
from dataclasses import replace

import pytest
import torch

from kernel_cases import SMALL, Case, build, poison, pool_tensors
from kernel_oracle import assert_as_good_as_torch
from kvplane import kernels
from kvplane.kernels import DtypeError, Layout, PagedKv, ShapeError, StrideError, UnsupportedFeatureError, reference
from kvplane.kernels.backend import backend_for
from kvplane.kernels.cpu.backend import CpuBackend
from kvplane.kernels.cuda.backend import CudaBackend
from kvplane.kernels.cuda.work import refill

_SHORT = ((40, 7), (20, 20), (33, 1), (0, 2))

CASES = (
    *SMALL,
    *(
        replace(case, name=f"{case.name}, {dtype}", dtype=dtype)
        for case in SMALL
        for dtype in (torch.bfloat16, torch.float16)
    ),
    Case("three segments", _SHORT, segments=3, layout=Layout.NHD, interleaved=True, dtype=torch.bfloat16),
    Case("three segments, soft cap", _SHORT, segments=3, soft_cap=3.0, scale=0.5),
    Case("several splits", ((600, 1), (300, 3)), kv_heads=1, group=2),
    Case("window over a split", ((600, 3),), kv_heads=1, group=2, window=300),
    Case("shared prefix", ((530, 1), (540, 1), (520, 1)), shared_prefix_tokens=512, kv_heads=1),
    Case("not causal", ((40, 7), (5, 5)), causal=False),
    Case("odd group and head dim", ((40, 7), (5, 5)), group=7, kv_heads=1, head_dim=80, dtype=torch.bfloat16),
    *(
        Case(f"{name}, {dim}", ((40, 7), (17, 1)), dtype, scales=scales, query_dtype=torch.bfloat16, head_dim=dim)
        for name, dtype in (("e4m3", torch.float8_e4m3fn), ("int8", torch.int8))
        for scales, dim in (("heads", 64), ("tensor", 128))
    ),
    Case("many rows", ((70, 60),), group=3, kv_heads=1),
    Case("group beyond a narrow item", ((50, 1),), group=20, kv_heads=1),
    *(Case(f"block size {size}", ((40, 3), (9, 1)), block_size=size, kv_heads=1) for size in (1, 8, 64)),
)


def test_this_process_emulates() -> None:
    assert isinstance(backend_for(torch.device("cpu")), CudaBackend)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(case: Case) -> None:
    batch = build(case)
    assert_as_good_as_torch(batch, *batch.attend())


def test_alone_equals_in_a_batch() -> None:
    batch = build(Case("batch", ((300, 1), (40, 3), (17, 17)), dtype=torch.bfloat16, kv_heads=1))
    out, lse = batch.attend()
    row = 0
    for b, (_, queries) in enumerate(batch.case.sequences):
        rows = slice(row, row + queries)
        alone, alone_lse = kernels.attend(batch.plan_of(range(b, b + 1)), batch.query[rows], batch.layer)
        assert torch.equal(alone, out[rows])
        assert torch.equal(alone_lse, lse[rows])
        row += queries


def test_nan_of_other_sequences_and_unwritten_slots_is_not_read_and_ones_own_is_not_hidden() -> None:
    batch = build(Case("nan", ((20, 1), (20, 1))))
    batch.layer.keys[0][int(batch.tables[0, 0]), :, 2] = torch.nan
    out, lse = batch.attend()
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()


def test_a_captured_plan_takes_other_batches_in_place() -> None:
    largest = build(Case("largest", ((300, 1), (300, 1), (300, 40)), kv_heads=1, padding_tokens=10))
    captured = largest.plan()
    addresses = [getattr(captured.work, name).data_ptr() for name in ("buffer", "partial_out", "partial_lse")]
    for sequences in (((17, 1), (40, 3)), ((260, 2), (0, 0), (100, 30)), ((300, 1), (300, 1), (300, 40))):
        rows = sum(queries for _, queries in sequences)
        case = replace(largest.case, sequences=sequences, padding_tokens=52 - rows)
        batch = replace(largest, case=case, tables=largest.tables[: len(sequences)])
        refill(captured, batch.plan())
        poison(captured.work)
        out, lse = kernels.attend(captured, batch.query, batch.layer)
        assert_as_good_as_torch(batch, out, lse)
    assert addresses == [getattr(captured.work, name).data_ptr() for name in ("buffer", "partial_out", "partial_lse")]
    larger = replace(largest.case, sequences=((300, 30), (300, 10), (300, 12)), padding_tokens=0)
    with pytest.raises(ShapeError, match="room"):
        refill(captured, replace(largest, case=larger).plan())
    with pytest.raises(ShapeError, match="scale"):
        refill(captured, replace(largest, case=replace(largest.case, scale=2.0)).plan())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_writes(dtype: torch.dtype) -> None:
    case = Case("quantised", ((20, 20), (3, 1)), dtype, scales="heads", query_dtype=torch.bfloat16, interleaved=True)
    written, expected = build(case), build(case)
    plan = written.plan()
    # Past the largest number of the format as well. For e4m3 no NaN, and no number that has to be rounded: the
    # interpreter converts some of them wrongly (test_gpu.py has those).
    numbers = torch.randn(2, 21, 2, 64) * 400 / case.spread
    if dtype == torch.float8_e4m3fn:
        scales = [scale[:, None] for scale in case.key_and_value_scales() if scale is not None]
        numbers = torch.stack([numbers[i].to(dtype).float() * scales[i] for i in range(2)])
        numbers[:, 3] = 5000.0
    key, value = numbers.to(torch.bfloat16)
    kernels.write(plan, key, value, written.layer)
    reference.write(plan, key, value, expected.layer)
    for got, want in zip(written.pools, expected.pools, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    with pytest.raises(UnsupportedFeatureError, match="float32"):
        kernels.write(plan, key.float(), value.float(), written.layer)


def test_rows_of_any_alignment() -> None:
    batch = build(Case("aligned", ((40, 3), (9, 1)), kv_heads=1))
    expected, expected_lse = batch.attend()
    rows, heads, dim = batch.query.shape
    query = torch.full((rows, heads, dim + 1), torch.nan)[..., 1:]
    query.copy_(batch.query)
    frame, lse = torch.full((rows, heads, dim + 2), 7.0), torch.full((heads, rows + 1), torch.nan)[:, 1:].T
    kernels.attend(batch.plan(), query, batch.layer, out=frame[..., 1:-1], lse=lse)
    assert torch.equal(frame[..., 1:-1], expected)
    assert torch.equal(lse, expected_lse)
    assert (frame[..., [0, -1]] == 7).all()


def test_what_the_launch_table_has_not_is_refused_when_the_pool_is_made() -> None:
    for dtype, dim in ((torch.bfloat16, 48), (torch.float32, 256)):
        with pytest.raises(UnsupportedFeatureError, match=rf"head_dim: {dim} with a .* cache is not built on CUDA"):
            pool_tensors(Case("outside", (), dtype, head_dim=dim), 4)
    with pytest.raises(UnsupportedFeatureError, match="5 segments"):
        pool_tensors(Case("segments", (), segments=5), 10)


def test_strides_that_would_lose_the_fast_path_are_refused_when_the_pool_is_made() -> None:
    wide = torch.zeros(4, 2, 16, 64 + 8, dtype=torch.bfloat16)
    with pytest.raises(StrideError, match="multiples of 16 elements"):
        PagedKv.of(wide[..., :64], wide[..., :64])
    near = torch.zeros(1 << 16, dtype=torch.bfloat16)
    segments = [near[at : at + 4 * 2 * 16 * 64].view(4, 2, 16, 64) for at in (0, 16384 + 8)]
    with pytest.raises(StrideError, match="32 bytes apart"):
        PagedKv.of(segments, segments)


def test_dtypes_of_queries_and_outputs_that_are_not_built() -> None:
    batch = build(Case("dtypes", ((9, 1),), dtype=torch.bfloat16))
    plan = batch.plan()
    with pytest.raises(UnsupportedFeatureError, match=r"query\.dtype"):
        kernels.attend(plan, batch.query.float(), batch.layer)
    with pytest.raises(DtypeError, match="out"):
        kernels.attend(plan, batch.query, batch.layer, out=batch.query.float())


def test_checksums_equal_those_of_the_cpu_backend() -> None:
    for layout, interleaved, segments in itertools.product(Layout, (False, True), (1, 3)):
        case = Case("sums", (), torch.float16, layout=layout, interleaved=interleaved, segments=segments)
        layer, pools = pool_tensors(case, 12)
        for pool in pools:
            pool.copy_(torch.randn(pool.shape))
        blocks = torch.tensor([3, 11, 0, 3]).numpy()
        assert (kernels.checksum_blocks(layer, blocks) == CpuBackend().checksum_blocks(layer, blocks)).all()
