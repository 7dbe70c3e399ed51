"""Tensor-parallel shards, pipelines, windows and layouts: the same answers, wherever the bytes lie."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compute_control import ControlPlane
from compute_engine import WRITE_AND_ATTEND, RemoteEngine, read_request, running, settings
from compute_harness import ORACLE
from compute_oracle import Oracle, assert_attention
from kvplane.wire.errors import InvalidArgumentError, NotGrantedError

TOKENS = list(range(100, 113))


@contextmanager
def shards(folder: Path, count: int, **changes: Any) -> Iterator[tuple[ControlPlane, list[RemoteEngine]]]:
    """A pool over so many shards, and one session's engine on each."""
    with ExitStack() as stack:
        control = ControlPlane().start(f"unix:{folder / 'cache.sock'}")
        stack.callback(control.stop)
        servers = [
            stack.enter_context(running(settings(folder, f"compute-{rank}", rank=rank, **changes)))
            for rank in range(count)
        ]
        control.wait(count)
        control.create_pool(32)
        session = control.open_session()
        engines = [RemoteEngine(server.addresses[0], session) for server in servers]
        for engine in engines:
            stack.callback(engine.close)
        yield control, engines


def run(engine: RemoteEngine, sequence: int, start: int, layer_rows: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    plan = engine.plan({sequence: (len(TOKENS) - start, len(TOKENS))})
    outs = [
        engine.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
        for layer, (query, key, value) in enumerate(layer_rows)
    ]
    engine.close_plan(plan)
    return outs


def test_shards_give_the_heads_of_the_whole(tmp_path: Path) -> None:
    """Concatenated over ranks, bit by bit; the bytes in the blocks as well."""
    rows = [ORACLE.rows(TOKENS, 0, len(TOKENS), layer) for layer in range(2)]
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    with shards(tmp_path / "whole", 1) as (control, (engine,)):
        blocks = control.new_blocks([1, 2, 3, 4])
        engine.apply(control.grant(engine.session, {0: (0, blocks)}))
        whole = run(engine, 0, 0, rows)
    with shards(tmp_path / "parts", 2, tensor_parallel=2) as (control, engines):
        blocks = control.new_blocks([1, 2, 3, 4])
        grant = control.grant(engines[0].session, {0: (0, blocks)})
        parts = []
        for rank, engine in enumerate(engines):
            engine.apply(grant)
            mine = [(q[:, 2 * rank : 2 * rank + 2], k[:, rank : rank + 1], v[:, rank : rank + 1]) for q, k, v in rows]
            parts.append(run(engine, 0, 0, mine))
            assert control.shards[rank].register.shard.first_kv_head == rank
        for layer in range(2):
            assert torch.cat([part[layer] for part in parts], 1).equal(whole[layer])
            assert_attention(whole[layer], ORACLE.attention(TOKENS, 0, len(TOKENS), layer))


def test_pipeline_stages_hold_their_layers(tmp_path: Path) -> None:
    with shards(tmp_path, 2, pipeline_parallel=2) as (control, engines):
        grant = control.grant(engines[0].session, {0: (0, control.new_blocks([1, 2, 3, 4]))})
        for layer, engine in enumerate(engines):
            engine.apply(grant)
            plan = engine.plan({0: (13, 13)})
            query, key, value = ORACLE.rows(TOKENS, 0, 13, layer)
            with pytest.raises(InvalidArgumentError, match="not held"):
                engine.run(plan, 1 - layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
            out = engine.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
            assert_attention(out, ORACLE.attention(TOKENS, 0, 13, layer))
            # With its only layer written, the stage has filled the blocks.
            engine.close_plan(plan)
            assert engine.plan({0: (0, 13)})


@pytest.mark.parametrize("head_layout", ["NHD", "HND"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_layouts_hold_the_same_canonical_bytes(
    tmp_path: Path, head_layout: str, interleaved: bool, kv_dtype: str
) -> None:
    dtype = getattr(torch, kv_dtype)
    oracle = Oracle(2, 2, 4, 16, dtype)
    changes = {"head_layout": head_layout, "interleaved_kv": interleaved, "kv_dtype": kv_dtype}
    with shards(tmp_path, 1, **changes) as (control, (engine,)):
        blocks = control.new_blocks([9, 3, 5, 1])
        engine.apply(control.grant(engine.session, {0: (0, blocks)}))
        outs = run(engine, 0, 0, [oracle.rows(TOKENS, 0, 13, layer) for layer in range(2)])
        for layer in range(2):
            assert_attention(outs[layer], oracle.attention(TOKENS, 0, 13, layer))
        pieces = [each.piece for each in engine.stub.ReadBlocks(read_request(engine.session, blocks))]
        expected = []
        for layer in range(2):
            for tensor in oracle.rows(TOKENS, 0, 13, layer)[1:]:
                padded = torch.zeros(16, 2, 16, dtype=dtype)
                padded[:13] = tensor
                expected.append(padded.view(torch.uint8).numpy().tobytes())
        assert [piece.payload for piece in pieces] == expected


def test_a_window_leaves_null_blocks_behind(tmp_path: Path) -> None:
    """Blocks that no token sees any more are null in the table; those that some token sees are asked for."""
    with shards(tmp_path, 1, window_tokens=5) as (control, (engine,)):
        blocks = control.new_blocks([1, 2, 3, 4])
        engine.apply(control.grant(engine.session, {0: (0, blocks)}))
        tokens = TOKENS[:12]
        plan = engine.plan({0: (12, 12)})
        for layer in range(2):
            query, key, value = ORACLE.rows(tokens, 0, 12, layer)
            out = engine.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
            assert_attention(out, ORACLE.attention(tokens, 0, 12, layer, window=5))
        engine.close_plan(plan)
        engine.apply(control.grant(engine.session, {0: (0, [(0, 0), (0, 0)])}))
        plan = engine.plan({0: (1, 13)})
        query, key, value = ORACLE.rows(TOKENS, 12, 13, 0)
        out = engine.run(plan, 0, WRITE_AND_ATTEND, query=query, key=key, value=value)
        assert_attention(out, ORACLE.attention(TOKENS, 12, 13, 0, window=5))
        with pytest.raises(NotGrantedError, match="left its window"):
            engine.plan({0: (6, 13)})
