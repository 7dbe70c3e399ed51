"""Whole blocks: copied, gathered, scattered, zeroed, summed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernel_cases import Case, block_views, pool_tensors
from kvplane import kernels
from kvplane.kernels import Layout, PagedKv

CASE = Case("blocks", (), kv_heads=3, head_dim=64, block_size=8)
VARIANTS = [
    replace(CASE, layout=layout, interleaved=interleaved, segments=segments, dtype=dtype)
    for layout in Layout
    for interleaved, segments, dtype in ((False, 1, torch.float32), (True, 2, torch.bfloat16))
]


def filled(case: Case, num_blocks: int = 12) -> tuple[PagedKv, torch.Tensor]:
    """A layer of random contents, and the contents [blocks, 2, kv_heads, block_size, head_dim]."""
    layer, _ = pool_tensors(case, num_blocks)
    contents = torch.randn(num_blocks, 2, case.kv_heads, case.block_size, case.head_dim).to(case.dtype)
    for block in range(num_blocks):
        for part, content in zip(block_views(layer, block), contents[block], strict=True):
            part.copy_(content)
    return layer, contents


def contents_of(layer: PagedKv) -> torch.Tensor:
    return torch.stack([torch.stack(block_views(layer, block)) for block in range(layer.geometry.num_blocks)])


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_gather_and_scatter(case: Case) -> None:
    layer, contents = filled(case)
    key, value = kernels.gather_blocks(layer, [5, 0, 11, 5])
    assert key.shape == (4, case.block_size, case.kv_heads, case.head_dim)
    assert torch.equal(key, contents[[5, 0, 11, 5], 0].transpose(1, 2))
    assert torch.equal(value, contents[[5, 0, 11, 5], 1].transpose(1, 2))
    other, before = filled(case)
    kernels.scatter_blocks(other, [2, 9], key[:2], value[:2])
    before[[2, 9]] = contents[[5, 0]]
    assert torch.equal(contents_of(other), before)


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_zero(case: Case) -> None:
    layer, contents = filled(case)
    kernels.zero_blocks(layer, [3, 7])
    contents[[3, 7]] = 0
    assert torch.equal(contents_of(layer), contents)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 11), unique=True, max_size=11).flatmap(
        lambda written: st.tuples(
            st.just(written), st.lists(st.integers(0, 11), min_size=len(written), max_size=len(written))
        )
    )
)
def test_18_copies_with_chains_swaps_and_fans(mapping: tuple[list[int], list[int]]) -> None:
    destinations, sources = mapping
    layer, contents = filled(CASE)
    kernels.copy_blocks(layer, sources, destinations)
    expected = contents.clone()
    expected[destinations] = contents[sources]
    assert torch.equal(contents_of(layer), expected)


def splitmix_sum(words: NDArray[np.uint64]) -> int:
    """The definition of the checksum, in Python integers."""
    total, mask = 0, (1 << 64) - 1
    for place, word in enumerate(words.tolist(), 1):
        x = (word + place * 0x9E3779B97F4A7C15) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        total = (total + (x ^ (x >> 31))) & mask
    return total


def test_checksum_is_its_definition_in_every_layout() -> None:
    sums = set()
    for layout in Layout:
        for interleaved in (False, True):
            torch.manual_seed(3)
            layer, contents = filled(replace(CASE, layout=layout, interleaved=interleaved))
            canonical = contents[4].transpose(1, 2).contiguous()
            expected = splitmix_sum(canonical.numpy().view(np.uint64).ravel())
            got = kernels.checksum_blocks(layer, [4, 5])
            assert int(got[0]) == expected
            assert got[0] != got[1]
            sums.add(int(got[0]))
    assert len(sums) == 1


def test_checksum_sees_swapped_slots_and_single_bits() -> None:
    layer, _ = filled(CASE)
    (before,) = kernels.checksum_blocks(layer, [4])
    key = layer.keys[0][4]
    key[:, [0, 1]] = key[:, [1, 0]]
    (swapped,) = kernels.checksum_blocks(layer, [4])
    key[0, 0].view(torch.int32)[0] ^= 1
    (flipped,) = kernels.checksum_blocks(layer, [4])
    assert len({int(before), int(swapped), int(flipped)}) == 3


def test_many_blocks_by_several_threads() -> None:
    case = Case("many", (), kv_heads=4, head_dim=128, layout=Layout.NHD)
    layer, contents = filled(case, 300)
    ids = torch.randperm(299) + 1
    key, value = kernels.gather_blocks(layer, ids)
    assert torch.equal(key, contents[ids, 0].transpose(1, 2))
    kernels.zero_blocks(layer, ids)
    kernels.scatter_blocks(layer, ids, key, value)
    assert torch.equal(contents_of(layer), contents)
    single = [int(kernels.checksum_blocks(layer, [int(i)])[0]) for i in ids[:20]]
    assert kernels.checksum_blocks(layer, ids)[:20].tolist() == single
