"""Attention through compute access, in every mode and on every kind of pool: outputs equal exact attention."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compute_access import BLOCK, MODES, Rig, rig
from compute_oracle import Oracle

POOLS: dict[str, tuple[int, dict[str, Any]]] = {
    "one shard": (1, {}),
    "tensor parallel": (2, {"tensor_parallel": 2}),
    "replicated heads": (4, {"tensor_parallel": 4}),
    "pipeline": (2, {"pipeline_parallel": 2}),
    "NHD, interleaved": (1, {"head_layout": "NHD", "interleaved_kv": True}),
}
PROMPT = list(range(100, 118))


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    shards, changes = POOLS[request.param]
    with rig(tmp_path_factory.mktemp("kv"), shards, change=lambda _: changes) as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
def test_the_life_of_requests(pool: Rig, mode: str) -> None:
    """Prefill, decode, a prefix hit by another session, chunks, a mixed batch, forks with copied tails."""
    first = list(MODES).index(mode) * 1000
    prompt = [first + token for token in PROMPT]
    writer, reader = pool.engine(mode), pool.engine(mode)
    assert writer.compute.transport == ("inline" if mode == "remote inline" else "shm")
    a = writer.admit(prompt)
    assert writer.written[a] == 0
    writer.forward(a)
    for token in (7, 8, 9):
        writer.advance({a: token})
        writer.forward(a)
    writer.grow(a, len(writer.tokens[a]))
    writer.session.flush()
    b = reader.admit([*prompt, 1, 2, 3])
    assert reader.written[b] == len(prompt) // BLOCK * BLOCK
    reader.forward(b)
    c = reader.admit([first + 500 + token for token in range(21)], max_chunk_tokens=8)
    reader.forward(c, ends={c: 8})
    reader.advance({b: 5})
    reader.grow(c, 16)
    reader.forward(b, c, ends={c: 16})
    reader.grow(c, 21)
    reader.forward(c)
    children = reader.fork(c, 2)
    assert reader.session.sequences.num_slots[children[0] & 0xFFFF_FFFF] == 24
    reader.advance({c: 40, children[0]: 41, children[1]: 42})
    reader.forward(c, *children)
    reader.advance({c: 50, children[0]: 50, children[1]: 50, b: 51})
    reader.forward(b, *children, c)
    reader.finish(*children, c, b)
    writer.finish(a)
    pool.service.check_integrity()
    for engine in (reader, writer):
        engine.close()


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("attached", torch.bfloat16), ("remote shm", torch.float16), ("remote inline", torch.bfloat16)],
)
def test_other_dtypes_and_windows(tmp_path: Path, mode: str, dtype: torch.dtype) -> None:
    """A sliding-window pool: blocks leave the window while the sequence grows."""
    with rig(tmp_path, oracle=Oracle(2, 2, 4, 32, dtype), change=lambda _: {"window_tokens": 6}) as pool:
        engine = pool.engine(mode)
        sequence = engine.admit(list(range(10)))
        engine.forward(sequence)
        for token in range(20, 32):
            engine.advance({sequence: token})
            engine.forward(sequence)
        assert engine.session.sequences.blocks[sequence & 0xFFFF_FFFF, 0] == 0
        engine.finish(sequence)


@pytest.mark.parametrize("mode", MODES)
def test_write_and_attend_apart(pool: Rig, mode: str) -> None:
    """`run` is `write` and `attend`; `attend` gives the log-sum-exp as well; `out` and `scale` are the caller's."""
    engine, oracle = pool.engine(mode), pool.oracle
    tokens = [40 + list(MODES).index(mode), 2, 3, 4, 5, 6]
    sequence = engine.admit(tokens)
    with engine.compute.plan([sequence], [6], [6], num_query_heads=8) as plan:
        for layer in range(oracle.num_layers):
            query, key, value = oracle.rows(tokens, 0, 6, layer)
            plan.write(layer, key, value)
            out, lse = plan.attend(layer, query)
            again = torch.empty_like(query)
            assert plan.attend(layer, query, again)[0] is again
            torch.testing.assert_close(again, out)
            halved, _ = plan.attend(layer, query / 2, scale=2 * oracle.head_dim**-0.5)
            torch.testing.assert_close(halved, out)
            scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(4, 1)).double() * oracle.head_dim**-0.5
            scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
            torch.testing.assert_close(lse.double(), scores.logsumexp(2).T, rtol=2e-5, atol=2e-5)
    # Three query heads for every KV head: two replicas cannot divide them.
    with engine.compute.plan([sequence], [6], [6], num_query_heads=6) as plan:
        for layer in range(oracle.num_layers):
            query, key, value = oracle.rows(tokens, 0, 6, layer)
            out, lse = plan.attend(layer, query[:, :6])
            q, k, v = (each.double().transpose(0, 1) for each in (query[:, :6], key, value))
            exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.testing.assert_close(out.double(), exact.transpose(0, 1), rtol=2e-5, atol=2e-5)
            assert lse.shape == (6, 6)
    engine.finish(sequence)
    engine.close()
