"""Attention against the float64 reference: a matrix of cases, then cases nobody thought of."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_cases import ALL, Case, build
from kernel_oracle import assert_as_good_as_torch
from kvplane.kernels import Layout


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_matrix(case: Case) -> None:
    batch = build(case)
    assert_as_good_as_torch(batch, *batch.attend())


_LENGTHS = st.one_of(st.sampled_from((0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 511, 512, 513)), st.integers(0, 600))


@st.composite
def _sequences(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    lengths = draw(st.lists(_LENGTHS, min_size=0, max_size=5))
    return tuple((n, draw(st.integers(0, min(n, 40) if n else 2))) for n in lengths)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.builds(
        Case,
        name=st.just("fuzz"),
        sequences=_sequences(),
        dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from((1, 2, 3, 4, 5, 8, 20)),
        head_dim=st.sampled_from((16, 48, 64, 80, 128)),
        block_size=st.sampled_from((1, 2, 8, 16, 64)),
        layout=st.sampled_from(Layout),
        interleaved=st.booleans(),
        segments=st.integers(1, 3),
        window=st.none() | st.integers(1, 600),
        soft_cap=st.none() | st.floats(0.5, 50),
        padding_tokens=st.integers(0, 3),
        spare_entries=st.integers(0, 3),
        sinks=st.booleans(),
        alibi=st.booleans(),
    ),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fuzz(case: Case, causal: bool, seed: int) -> None:
    batch = build(replace(case, causal=causal or case.window is not None or case.alibi), seed)
    assert_as_good_as_torch(batch, *batch.attend())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    own=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 30)), min_size=1, max_size=6),
    shared=st.sampled_from((16, 512, 528, 1024)),
    group=st.sampled_from((1, 3, 4, 16)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    causal=st.booleans(),
)
def test_fuzz_shared_prefix(
    own: list[tuple[int, int]], shared: int, group: int, dtype: torch.dtype, causal: bool
) -> None:
    sequences = tuple((shared + tokens, min(queries, tokens)) for tokens, queries in own)
    case = Case("shared", sequences, dtype, group=group, shared_prefix_tokens=shared, causal=causal)
    batch = build(case)
    assert_as_good_as_torch(batch, *batch.attend())
