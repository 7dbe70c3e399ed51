"""Which models run on a pool: unmodified ones of several families; the others are refused with the reason."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from engine_rig import greedy, on_kvplane, pool_for, prompts, seeded, tiny_llama
from kvplane.client.integrations.transformers import SamplingParams, adopt_model, load_model
from kvplane.client.revisions import tokenizer_revision, weights_revision
from kvplane.wire.errors import InvalidArgumentError, NotFoundError, UnsupportedFeatureError

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: list[tuple[Any, Any, dict[str, Any]]] = [
    (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1, "head_dim": 48}),
    (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
    (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 8.0},
    ),
]


@pytest.mark.parametrize(("kind", "config", "changes"), FAMILIES, ids=lambda value: getattr(value, "__name__", ""))
def test_families(kind: Any, config: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    """Greedy tokens are plain transformers', past every window, in chunks, twice (the second time from the cache)."""
    plain = seeded(kind, config(**(SMALL | changes)))
    model = on_kvplane(plain, kind.__name__)
    asked = prompts([5, 40, 70], seed=1)
    with pool_for(tmp_path, model, num_blocks=64) as pool, pool.engine(max_batch_tokens=32, max_running=8) as engine:
        outputs = engine.generate(asked, SamplingParams(max_new_tokens=24))
        engine.session.flush()
        again = engine.generate(asked, SamplingParams(max_new_tokens=24))
    for prompt, output, repeated in zip(asked, outputs, again, strict=True):
        assert output.token_ids == repeated.token_ids == greedy(plain, prompt, 24)
    assert [output.metrics.cached_tokens for output in again] == [0, 32, 64]


REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (GptOssForCausalLM, GptOssConfig, {"num_local_experts": 2}, "sinks"),
    (Llama4ForCausalLM, Llama4TextConfig, {"num_local_experts": 2, "intermediate_size_mlp": 96}, "chunked_attention"),
    (BloomForCausalLM, BloomConfig, {}, "does not let its attention be replaced"),
    (T5ForConditionalGeneration, T5Config, {}, "no causal decoder"),
    (LlamaForCausalLM, LlamaConfig, {"head_dim": 24}, "multiples of 16"),
]


@pytest.mark.parametrize(
    ("kind", "config", "changes", "why"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_refused(kind: Any, config: Any, changes: dict[str, Any], why: str) -> None:
    """Loud, and before anything runs."""
    with pytest.raises(UnsupportedFeatureError, match=why):
        adopt_model(seeded(kind, config(**(SMALL | changes))), None, "w")


def test_a_model_folder(tmp_path: Path) -> None:
    """Any local folder; equal weights are one model wherever they lie, other weights are another."""
    for place in ("a", "b"):
        tiny_llama().save_pretrained(tmp_path / place)
    tiny_llama(initializer_range=0.2).save_pretrained(tmp_path / "c")
    revisions = [weights_revision(tmp_path / place) for place in "abc"]
    assert revisions[0] == revisions[1] != revisions[2]
    assert weights_revision(tmp_path / "a") == revisions[0]
    model = load_model(tmp_path / "a", torch.float32)
    assert model.weights_revision == revisions[0]
    assert model.tokenizer is None
    assert model.compute_settings()["kv_dtype"] == "float32"
    assert tokenizer_revision(tmp_path / "a") == tokenizer_revision(tmp_path / "b")
    weights = next((tmp_path / "a").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert weights_revision(tmp_path / "a") != revisions[0]
    with pytest.raises(InvalidArgumentError):
        load_model(tmp_path / "none")
    with pytest.raises(NotFoundError):
        weights_revision(tmp_path)


def test_the_client_imports_no_torch() -> None:
    """The engine is behind an extra: importing the SDK must not import it."""
    code = "import sys, kvplane.client; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
