"""The planner: known cases, and agreement with what the services really make of the same numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core_driver import Engine, small_core
from kvplane.cli import capacity, sizes
from kvplane.cli.capacity import CapacityPlan, Deployment
from kvplane.cli.model import LayerGroup, ModelShape, read_model, shape_of
from kvplane.compute.config import ComputeConfig
from kvplane.compute.identity import identity_of, max_blocks
from kvplane.compute.pool import create_pool
from kvplane.wire.directory import DirectorySpec
from kvplane.wire.errors import InvalidArgumentError, KvplaneError, LimitExceededError, UnsupportedFeatureError

MIB, GIB = 2**20, 2**30
LLAMA_2_13B = {
    "model_type": "llama",
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "hidden_size": 5120,
    "torch_dtype": "float16",
}


def full(num_layers: int, num_kv_heads: int, head_dim: int) -> ModelShape:
    return ModelShape((LayerGroup(num_layers, None),), num_kv_heads, head_dim, None)


def test_llama_2_13b() -> None:
    """The figures of Kwon et al. 2023 (PagedAttention): 0.78 MiB a token in fp16, 3.1 GiB at 4,096 tokens; reserving
    2,048 slots wastes 97.5 % on a sequence of 50 tokens, blocks of 16 waste at most 15."""
    shape = shape_of(LLAMA_2_13B)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype) == (40, 40, 128, "float16")
    plan = capacity.plan(shape, Deployment("float16"), 16 * GIB)
    assert plan.token_bytes / MIB == pytest.approx(0.78, abs=0.005)
    assert plan.sequence(4096).num_bytes / GIB == pytest.approx(3.1, abs=0.05)
    assert plan.block_bytes == 16 * plan.token_bytes
    assert capacity.unused_share(2048, 50) == pytest.approx(0.975, abs=0.001)
    assert plan.sequence(50).unused_slots == 14
    assert max(plan.sequence(length).unused_slots for length in range(1, 200)) == plan.max_unused_slots == 15
    # 16 GiB: 1,310 blocks of 12.5 MiB, one of them the null block; 26 stay free for who runs already.
    assert plan.num_blocks == 1310
    assert plan.sequence(4096).fit == (1309 - 26) // 256 == 5


CASES: list[dict[str, Any]] = [
    {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "kv_dtype": "float32", "block_tokens": 4},
    {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "kv_dtype": "bfloat16"},
    {"num_layers": 3, "num_kv_heads": 8, "head_dim": 80, "kv_dtype": "float16", "tensor_parallel": 4},
    {"num_layers": 3, "num_kv_heads": 2, "head_dim": 128, "kv_dtype": "bfloat16", "tensor_parallel": 8},
    {"num_layers": 7, "num_kv_heads": 4, "head_dim": 64, "kv_dtype": "float32", "pipeline_parallel": 3},
    {"num_layers": 5, "num_kv_heads": 4, "head_dim": 32, "tensor_parallel": 2, "pipeline_parallel": 2},
    {"num_layers": 2, "num_kv_heads": 1, "head_dim": 16, "window_tokens": 100, "block_tokens": 64},
    {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "kv_dtype": "bfloat16", "block_tokens": 1},
]


def planned(case: dict[str, Any], pool_bytes: int) -> CapacityPlan:
    shape = ModelShape(
        (LayerGroup(case["num_layers"], case.get("window_tokens")),), case["num_kv_heads"], case["head_dim"], None
    )
    names = ("kv_dtype", "block_tokens", "tensor_parallel", "pipeline_parallel")
    return capacity.plan(
        shape, Deployment(**{"kv_dtype": "bfloat16", **{k: case[k] for k in names if k in case}}), pool_bytes
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("pool_bytes", [3 * MIB, 10**7 + 1])
def test_the_compute_service_makes_the_same_pool(case: dict[str, Any], pool_bytes: int, tmp_path: Path) -> None:
    """Per shard: layers, heads, bytes of a block, and the files of a real pool, byte by byte; the pool has as many
    blocks as its poorest shard has room for."""
    plan = planned(case, pool_bytes)
    fits = []
    for shard in plan.shards:
        config = ComputeConfig(
            weights_revision="w", rank=shard.rank, pool_bytes=pool_bytes, memory_folder=tmp_path / "memory", **case
        )
        identity = identity_of(config)
        layout = identity.layout
        assert layout.layers == tuple(range(shard.first_layer, shard.first_layer + shard.num_layers))
        assert (identity.spec.first_kv_head, layout.num_kv_heads) == (shard.first_kv_head, shard.num_kv_heads)
        assert identity.spec.replicated == shard.replicated
        assert layout.block_bytes == shard.block_bytes
        fits.append(max_blocks(config, identity))
        identity.folder.mkdir(parents=True)
        spec = DirectorySpec(plan.num_blocks, layout.block_tokens, identity.model, 1, identity.boot_id, 1)
        pool = create_pool(identity.folder, layout, spec, identity.device)
        made = {path.name.partition("-")[0]: path.stat().st_size for path in identity.folder.iterdir()}
        pool.release(unlink=True)
        assert made["blocks"] == shard.tensor_bytes
        assert made["directory"] + made["stamps"] == shard.bookkeeping_bytes
        assert sum(made.values()) == shard.total_bytes
    assert len(plan.shards) == plan.deployment.num_shards
    assert plan.num_blocks == min(fits)


def test_a_share_of_the_memory_is_split_as_the_service_splits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pool_bytes a service takes 80 % of what is free, rows and stamps included."""
    free = 123_456_789
    monkeypatch.setattr("kvplane.compute.memory.available_bytes", lambda _: free)
    config = ComputeConfig(weights_revision="w", memory_folder=tmp_path, **CASES[1])
    shape, deployment = full(30, 3, 64), Deployment("bfloat16")
    budget = sizes.parse_budget("80%", free, "memory")
    plan = capacity.plan(shape, deployment, capacity.pool_bytes_of_budget(shape, deployment, budget))
    assert plan.num_blocks == max_blocks(config, identity_of(config))


@pytest.mark.parametrize(("num_blocks", "length"), [(64, 40), (64, 16), (64, 1000), (200, 17), (8, 112)])
def test_as_many_sequences_are_admitted(num_blocks: int, length: int) -> None:
    """The cache core, with its default watermark, admits exactly the planned number of sequences side by side."""
    plan = planned(CASES[1], num_blocks * 16 * full(30, 3, 64).num_layers * 2 * 3 * 64 * 2)
    assert plan.num_blocks == num_blocks
    engine = Engine(small_core(num_blocks, watermark=capacity.WATERMARK), max_sequences=256)
    admitted = 0
    while engine.ask(range(1000 * admitted, 1000 * admitted + length))[1] is not None:
        admitted += 1
    assert admitted == plan.sequence(length).fit
    with pytest.raises(InvalidArgumentError, match="can never fit"):
        engine.ask(range((num_blocks - 1) * 16 + 1))
    assert plan.sequence((num_blocks - 1) * 16 + 1).fit == 0


def test_a_window_bounds_a_sequence() -> None:
    """Blocks of a decoding sequence, counted from the definition of a window at every position."""
    for window, size, length in ((1, 16, 40), (16, 16, 200), (17, 16, 200), (100, 64, 500), (5, 4, 3)):
        held = [
            at // size - max(0, at - window + 1) // size + 1  # blocks from the window's first token to the last one
            for at in range(length)
        ]
        assert capacity.sequence_blocks(length, size, window) >= max(held)
        if length > 2 * window + size:
            assert capacity.sequence_blocks(length, size, window) == max(held)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, full(12, 12, 64)),
        (
            {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
            full(30, 3, 64),
        ),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "hidden_size": 4096,
                "head_dim": 128,
                "dtype": "bfloat16",
            },
            ModelShape((LayerGroup(2, None),), 8, 128, "bfloat16"),
        ),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "head_dim": None,
                "sliding_window": 9,
            },
            ModelShape((LayerGroup(2, 9),), 4, 16, None),
        ),
        (
            {
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "sliding_window": 9,
                "use_sliding_window": False,
            },
            full(4, 4, 16),
        ),
        (
            {
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            ModelShape((LayerGroup(3, None), LayerGroup(1, 9)), 4, 16, None),
        ),
        (
            {
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            ModelShape((LayerGroup(1, None), LayerGroup(2, 9)), 4, 16, None),
        ),
        (
            {
                "dtype": "bfloat16",
                "text_config": {
                    "model_type": "gemma3_text",
                    "num_hidden_layers": 12,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "sliding_window": 1024,
                },
            },
            ModelShape((LayerGroup(2, None), LayerGroup(10, 1024)), 4, 256, "bfloat16"),
        ),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
            full(2, 1, 64),
        ),
    ],
)
def test_shapes_of_families(config: dict[str, Any], expected: ModelShape) -> None:
    """Layers, KV heads, head dimension, windows, in each family's own names."""
    assert shape_of(config) == expected


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"num_hidden_layers": None}, InvalidArgumentError, "num_hidden_layers"),
        ({"num_attention_heads": 0}, InvalidArgumentError, "num_attention_heads"),
        ({"hidden_size": None}, InvalidArgumentError, "hidden_size"),
        ({"kv_lora_rank": 512}, UnsupportedFeatureError, "latent attention"),
        ({"layer_types": ["linear_attention"] * 40}, UnsupportedFeatureError, "linear_attention"),
        ({"layer_types": ["full_attention"]}, InvalidArgumentError, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 40}, InvalidArgumentError, "sliding_window"),
    ],
)
def test_a_bad_config_is_named(changes: dict[str, Any], error: type[KvplaneError], named: str) -> None:
    """The key, never a KeyError."""
    with pytest.raises(error, match=named):
        shape_of(LLAMA_2_13B | changes)


@pytest.mark.parametrize(
    ("deployment", "field"),
    [
        (Deployment("int3"), "kv_dtype"),
        (Deployment("float16", block_tokens=24), "block_tokens"),
        (Deployment("float16", tensor_parallel=3), "tensor_parallel"),
        (Deployment("float16", tensor_parallel=0), "tensor_parallel"),
        (Deployment("float16", pipeline_parallel=41), "pipeline_parallel"),
    ],
)
def test_what_a_service_refuses_the_planner_refuses(deployment: Deployment, field: str) -> None:
    """With the field's name."""
    with pytest.raises(InvalidArgumentError, match=field):
        capacity.plan(shape_of(LLAMA_2_13B), deployment, GIB)
    with pytest.raises(LimitExceededError, match="a pool has at least 2"):
        capacity.plan(shape_of(LLAMA_2_13B), Deployment("float16"), 20 * MIB)


def test_a_folder_or_a_file(tmp_path: Path) -> None:
    """`config.json` is found in the folder; what is not there is named."""
    with pytest.raises(KvplaneError, match=str(tmp_path / "config.json")):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_13B))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == shape_of(LLAMA_2_13B)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GiB", 16 * GIB), ("1.5g", 3 * GIB // 2), ("20GB", 20 * 10**9), ("1073741824", GIB), ("10 MiB", 10 * MIB)],
)
def test_sizes(text: str, expected: int) -> None:
    """Decimal and binary units."""
    assert sizes.parse_bytes(text, "memory") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "16 apples", "0%", "101%", "x%"])
def test_what_is_no_size(text: str) -> None:
    """The option is named."""
    with pytest.raises(InvalidArgumentError, match="memory"):
        sizes.parse_budget(text, GIB, "memory")


def test_sizes_are_readable() -> None:
    """Binary units, four digits."""
    assert sizes.format_bytes(819_200) == "800 KiB"
    assert sizes.format_bytes(3.125 * GIB) == "3.125 GiB"
    assert sizes.format_bytes(0) == "0 B"


def test_the_planner_needs_no_torch() -> None:
    """It runs where only the client is installed."""
    code = "import sys, kvplane.cli.capacity, kvplane.cli.app; assert not {'torch', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
