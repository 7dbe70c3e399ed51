"""A decoder model with its tokenizer, ready for the engine: loaded from a local folder, checked, and identified."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvplane.client.integrations.transformers.attention import AttentionShape
from kvplane.client.integrations.transformers.packaged import default_model
from kvplane.client.integrations.transformers.support import probe
from kvplane.client.revisions import tokenizer_revision, weights_revision
from kvplane.v1 import types_pb2
from kvplane.wire.errors import IdentityMismatchError, InvalidArgumentError

KV_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model whose attention runs on kvplane. Make one with `load_model` or `adopt_model`."""

    module: PreTrainedModel
    tokenizer: Any
    """None: prompts are token ids, and outputs have no text."""
    weights_revision: str
    tokenizer_revision: str
    attention: AttentionShape
    dtype: torch.dtype
    max_length: int
    """Most tokens of a sequence, prompt included: what the positions of the model reach."""
    vocabulary: int
    eos_token_ids: frozenset[int]

    def compute_settings(self) -> dict[str, str | int]:
        """What a compute service has to be told to hold this model's cache (keys of its configuration)."""
        return {
            "weights_revision": self.weights_revision,
            "tokenizer_revision": self.tokenizer_revision,
            "kv_dtype": KV_DTYPES[self.dtype],
            "num_layers": self.attention.num_layers,
            "num_kv_heads": self.attention.num_kv_heads,
            "head_dim": self.attention.head_dim,
        }

    def check_pool(self, pool: types_pb2.Pool) -> None:
        """Raises `IdentityMismatchError` when a pool holds another model's cache."""
        identity = pool.model
        mine = (self.weights_revision, KV_DTYPES[self.dtype])
        theirs = (identity.weights_revision, identity.kv_dtype)
        if mine != theirs or identity.tokenizer_revision not in ("", self.tokenizer_revision):
            tokenizers = f"{identity.tokenizer_revision or '(any)'}, not {self.tokenizer_revision or '(none)'}"
            raise IdentityMismatchError(
                f"pool {pool.pool_id} holds the cache of weights {theirs[0]} in {theirs[1]}, this model has {mine[0]} "
                f"in {mine[1]}; the pool's tokenizer is {tokenizers}",
                metadata={"pool_id": pool.pool_id, "weights_revision": theirs[0], "kv_dtype": theirs[1]},
            )


def load_model(
    path: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model folder (config.json, safetensors, tokenizer); None means SmolLM2-135M-Instruct (`packaged`).

    Nothing is fetched from a hub: a name that is no folder is refused. Raises `InvalidArgumentError` (no folder,
    dtype), `UnsupportedFeatureError` (a model whose attention the kernels do not have) or `NotFoundError`.
    """
    folder = default_model(progress) if path is None else Path(path)
    if not folder.is_dir():
        raise InvalidArgumentError.of("model", f"must be a local folder; {folder} is none")
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer_config.json").exists() else None
    return adopt_model(module, tokenizer, weights_revision(folder), tokenizer_revision(folder))


def load_tokenizer(path: str | Path | None = None) -> Any:
    """The tokenizer of a model folder; None means SmolLM2's."""
    return AutoTokenizer.from_pretrained(default_model() if path is None else path, local_files_only=True)


def adopt_model(module: PreTrainedModel, tokenizer: Any, weights: str, tokenizer_files: str = "") -> LoadedModel:
    """Put a model that is already loaded on kvplane. `weights` names its weights: equal names share cached KV.

    Switches the module's attention implementation and puts it into evaluation mode; weights stay as they are. Raises
    `UnsupportedFeatureError` or `InvalidArgumentError`.
    """
    if module.dtype not in KV_DTYPES:
        raise InvalidArgumentError.of("dtype", f"must be one of {', '.join(KV_DTYPES.values())}, is {module.dtype}")
    module.train(False)
    config: Any = module.config
    ends = module.generation_config.eos_token_id if module.generation_config is not None else config.eos_token_id
    eos = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        weights_revision=weights,
        tokenizer_revision=tokenizer_files,
        attention=probe(module),
        dtype=module.dtype,
        max_length=config.max_position_embeddings,
        vocabulary=config.vocab_size,
        eos_token_ids=frozenset(eos),
    )
