"""What a plan refuses, with the type and the field it names; nothing has run when it does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernel_cases import Case, pool_tensors
from kvplane import kernels
from kvplane.kernels import (
    DtypeError,
    KernelError,
    PagedKv,
    ShapeError,
    SlotError,
    StrideError,
    TableError,
    UnsupportedFeatureError,
)

LAYER, POOLS = pool_tensors(Case("errors", ()), 8, fill=0.0)


def plan(
    tables: Any = ((1, 2), (3, 4)), lengths: Any = (20, 32), queries: Any = None, **options: Any
) -> kernels.AttentionPlan:
    return kernels.plan(LAYER.geometry, np.array(tables), lengths, queries, num_query_heads=8, **options)


REFUSED: list[tuple[type[KernelError], str, Callable[[], object]]] = [
    (TableError, "block_tables", lambda: plan(((1, 8), (3, 4)))),
    (TableError, "block_tables", lambda: plan(((1, -1), (3, 4)))),
    (TableError, "block_tables", lambda: plan(((1, 0), (3, 4)))),
    (TableError, "block_tables", lambda: plan(((1, 2**40), (3, 4)))),
    (TableError, "block_tables", lambda: plan(lengths=(20, 33))),
    (TableError, "block_tables", lambda: plan(lengths=(20, 2**40))),
    (TableError, "block_tables", lambda: plan(((1, 2), (3, 9)), window=1)),
    (TableError, "shared_prefix_tokens", lambda: plan(shared_prefix_tokens=16)),
    (ShapeError, "shared_prefix_tokens", lambda: plan(((1, 2), (1, 4)), shared_prefix_tokens=8)),
    (ShapeError, "shared_prefix_tokens", lambda: plan(((1, 2), (1, 2)), shared_prefix_tokens=32)),
    (
        UnsupportedFeatureError,
        "shared_prefix_tokens",
        lambda: plan(((1, 2), (1, 4)), shared_prefix_tokens=16, window=9),
    ),
    (ShapeError, "block_tables", lambda: plan((1, 2))),
    (ShapeError, "block_tables", lambda: plan(lengths=(20,))),
    (ShapeError, "block_tables", lambda: plan(queries=(1,))),
    (DtypeError, "block_tables", lambda: plan(((1.0, 2.0), (3.0, 4.0)))),
    (DtypeError, "sequence_lengths", lambda: plan(lengths=(20.0, 3.0))),
    (DtypeError, "block_tables", lambda: plan(np.full((2, 2), 2**63, np.uint64))),
    (ShapeError, "sequence_lengths", lambda: plan(lengths=(20, -1))),
    (ShapeError, "query_lengths", lambda: plan(queries=(1, -1))),
    (ShapeError, "query_lengths", lambda: plan(queries=(21, 1))),
    (ShapeError, "num_query_heads", lambda: kernels.plan(LAYER.geometry, [[1]], [1], num_query_heads=3)),
    (ShapeError, "num_query_heads", lambda: kernels.plan(LAYER.geometry, [[1]], [1], num_query_heads=0)),
    (ShapeError, "window", lambda: plan(window=0)),
    (ShapeError, "window", lambda: plan(window=4, causal=False)),
    (ShapeError, "soft_cap", lambda: plan(soft_cap=0.0)),
    (ShapeError, "soft_cap", lambda: plan(soft_cap=float("nan"))),
    (ShapeError, "scale", lambda: plan(scale=float("inf"))),
    (ShapeError, "padding_tokens", lambda: plan(padding_tokens=-1)),
    (ShapeError, "slots", lambda: plan(slots=[16])),
    (SlotError, "slots", lambda: plan(slots=[16, 128])),
    (SlotError, "slots", lambda: plan(slots=[16, 15])),
    (SlotError, "slots", lambda: plan(slots=[16, -2])),
    (SlotError, "slots", lambda: plan(slots=[16, 16])),
    (SlotError, "slots", lambda: plan(((1, 2), (1, 2)), lengths=(20, 20))),
    (ShapeError, "sinks", lambda: plan(sinks=torch.zeros(7))),
    (DtypeError, "sinks", lambda: plan(sinks=torch.zeros(8, dtype=torch.int32))),
    (ShapeError, "alibi_slopes", lambda: plan(alibi_slopes=torch.zeros(8, 1))),
    (UnsupportedFeatureError, "alibi_slopes", lambda: plan(alibi_slopes=torch.zeros(8), causal=False)),
    (UnsupportedFeatureError, "tree_mask", lambda: plan(tree_mask=torch.zeros(8))),
    (SlotError, "blocks", lambda: kernels.gather_blocks(LAYER, [8])),
    (SlotError, "blocks", lambda: kernels.gather_blocks(LAYER, [-1])),
    (SlotError, "blocks", lambda: kernels.zero_blocks(LAYER, [0])),
    (SlotError, "destinations", lambda: kernels.copy_blocks(LAYER, [1, 2], [3, 3])),
    (ShapeError, "destinations", lambda: kernels.copy_blocks(LAYER, [1, 2], [3])),
    (
        ShapeError,
        "key",
        lambda: kernels.scatter_blocks(LAYER, [1], torch.zeros(2, 16, 2, 64), torch.zeros(1, 16, 2, 64)),
    ),
]


@pytest.mark.parametrize(("error", "field", "call"), REFUSED)
def test_refused(error: type[KernelError], field: str, call: Callable[[], object]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert isinstance(caught.value, ValueError)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


GOOD = (4, 2, 16, 64)
BAD_LAYERS: list[tuple[type[KernelError], str, Callable[[], object]]] = [
    (ShapeError, "keys", lambda: PagedKv.of(tensors(4, 2, 16), tensors(4, 2, 16))),
    (ShapeError, "values", lambda: PagedKv.of(tensors(*GOOD), tensors(5, 2, 16, 64))),
    (ShapeError, "values", lambda: PagedKv.of([tensors(*GOOD)], [tensors(*GOOD)] * 2)),
    (ShapeError, "values", lambda: PagedKv.of([], [])),
    (ShapeError, "head_dim", lambda: PagedKv.of(tensors(4, 2, 16, 72), tensors(4, 2, 16, 72))),
    (ShapeError, "head_dim", lambda: PagedKv.of(tensors(4, 2, 16, 512), tensors(4, 2, 16, 512))),
    (ShapeError, "block_size", lambda: PagedKv.of(tensors(4, 2, 12, 64), tensors(4, 2, 12, 64))),
    (ShapeError, "block_size", lambda: PagedKv.of(tensors(4, 2, 512, 64), tensors(4, 2, 512, 64))),
    (ShapeError, "num_kv_heads", lambda: PagedKv.of(tensors(4, 0, 16, 64), tensors(4, 0, 16, 64))),
    (ShapeError, "blocks", lambda: PagedKv.interleaved(tensors(4, 3, 2, 16, 64))),
    (DtypeError, "values", lambda: PagedKv.of(tensors(*GOOD), tensors(*GOOD, dtype=torch.bfloat16))),
    (
        UnsupportedFeatureError,
        "keys.dtype",
        lambda: PagedKv.of(*[tensors(*GOOD, dtype=torch.float8_e5m2)] * 2),
    ),
    (UnsupportedFeatureError, "keys.dtype", lambda: PagedKv.of(*[tensors(*GOOD, dtype=torch.uint8)] * 2)),
    (
        DtypeError,
        "key_scale",
        lambda: PagedKv.of(tensors(*GOOD), tensors(*GOOD), key_scale=torch.ones(2)),
    ),
    (StrideError, "keys", lambda: PagedKv.of(tensors(4, 2, 64, 16).transpose(2, 3), tensors(*GOOD))),
    (StrideError, "values", lambda: PagedKv.of(tensors(*GOOD), tensors(4, 2, 16, 65)[..., :64])),
    (StrideError, "keys", lambda: PagedKv.of(tensors(4 * 2 * 16 * 64 + 1)[1:].view(GOOD), tensors(*GOOD))),
    (
        StrideError,
        "keys",
        lambda: PagedKv.of([tensors(*GOOD), tensors(4, 16, 2, 64).transpose(1, 2)], [tensors(*GOOD)] * 2),
    ),
]


@pytest.mark.parametrize(("error", "field", "call"), BAD_LAYERS)
def test_bad_layers(error: type[KernelError], field: str, call: Callable[[], object]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert caught.value.field == field


def test_bad_tensors_at_a_call_change_nothing() -> None:
    good = plan()
    query, rows = torch.zeros(2, 8, 64), torch.ones(2, 2, 64)
    out = torch.full((2, 8, 64), 7.0)
    small, _ = pool_tensors(Case("other", ()), 7)
    calls: list[tuple[type[KernelError], str, Callable[[], object]]] = [
        (ShapeError, "query", lambda: kernels.attend(good, query[:1], LAYER, out=out)),
        (DtypeError, "query", lambda: kernels.attend(good, query.double(), LAYER, out=out)),
        (
            StrideError,
            "query",
            lambda: kernels.attend(good, torch.zeros(2, 64, 8).transpose(1, 2), LAYER, out=out),
        ),
        (ShapeError, "out", lambda: kernels.attend(good, query, LAYER, out=out[:1])),
        (ShapeError, "lse", lambda: kernels.attend(good, query, LAYER, out=out, lse=torch.zeros(2, 7))),
        (
            DtypeError,
            "lse",
            lambda: kernels.attend(good, query, LAYER, out=out, lse=torch.zeros(2, 8).double()),
        ),
        (ShapeError, "layer", lambda: kernels.attend(good, query, small, out=out)),
        (ShapeError, "key", lambda: kernels.write(good, rows[:1], rows, LAYER)),
        (ShapeError, "value", lambda: kernels.write(good, rows, rows[:, :1], LAYER)),
        (DtypeError, "value", lambda: kernels.write(good, rows, rows.bfloat16(), LAYER)),
        (StrideError, "key", lambda: kernels.write(good, torch.zeros(2, 64, 2).transpose(1, 2), rows, LAYER)),
        (ShapeError, "layer", lambda: kernels.write(good, rows, rows, small)),
        (ShapeError, "lse_b", lambda: kernels.merge_states(out, out[..., 0], out, out[:1, :, 0])),
    ]
    for error, field, call in calls:
        with pytest.raises(error) as caught:
            call()
        assert caught.value.field == field
    assert (out == 7).all()
    assert not any(pool.any() for pool in POOLS)


def test_entries_that_left_the_window_are_never_looked_at() -> None:
    slid = plan(((2**40, 2), (-7, 4)), lengths=(20, 32), window=4)
    assert slid.block_tables.tolist() == [[0, 2], [0, 4]]


def test_lists_arrays_and_tensors_are_alike() -> None:
    plans = [
        kernels.plan(LAYER.geometry, tables, lengths, num_query_heads=2)
        for tables, lengths in (
            ([[1, 2]], [17]),
            (np.array([[1, 2]], np.uint32), np.array([17], np.int32)),
            (torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([17])),
        )
    ]
    assert all(p.slots.tolist() == [32] and p.block_tables.tolist() == [[1, 2]] for p in plans)


def test_a_plan_cannot_be_changed() -> None:
    made = plan()
    with pytest.raises(AttributeError):
        made.scale = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        made.block_tables[0, 0] = 5
