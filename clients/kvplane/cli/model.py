"""What a model's `config.json` says about its KV cache: layers, KV heads, head dimension, number format, windows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplane.wire.errors import InvalidArgumentError, NotFoundError, UnsupportedFeatureError

KV_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Number formats that compute services store, and their bytes."""

# Models whose configuration has a window but leaves out which layers slide: each layer but every n-th does.
# From transformers' configuration classes of these families.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}

_UNBUILT = {
    "kv_lora_rank": "latent attention (MLA)",
    "num_kv_shared_layers": "layers that share another layer's KV",
    "is_encoder_decoder": "cross attention",
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that need the same tokens: one cache group."""

    num_layers: int
    window_tokens: int | None
    """None: full attention."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how large a token's KV is."""

    groups: tuple[LayerGroup, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str | None
    """Number format of the weights; None: the configuration does not say."""

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(group.num_layers for group in self.groups)

    @property
    def window_tokens(self) -> int | None:
        """Window that all layers have; None for full attention, and when layers differ: one pool stores them all in
        full then, since several groups in a pool are not built."""
        return self.groups[0].window_tokens if len(self.groups) == 1 else None


def read_model(folder: Path) -> ModelShape:
    """Shape of the model in a folder, or of a `config.json` itself. Raises `NotFoundError` and what `shape_of` does."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no {path}", metadata={"hint": "--model takes a folder with a config.json"}
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError.of("model", f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgumentError.of("model", f"{path} holds no JSON object")
    return shape_of(config)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Shape that a `config.json` describes, in the names of the model families that transformers has.

    Raises `InvalidArgumentError` that names a missing or impossible key, and `UnsupportedFeatureError` for what no
    compute service stores yet.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and _first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers") is None:
        # A model of several modalities: the language model holds the KV. The outer level may hold the dtype.
        return shape_of({"dtype": config.get("dtype") or config.get("torch_dtype"), **text})
    for key, what in _UNBUILT.items():
        if config.get(key):
            raise UnsupportedFeatureError(f"config.json: {key}: {what} is not built", metadata={"feature": key})
    num_layers = _count(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    num_heads = _count(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    head_dim = _first(config, "head_dim") or _count(config, "hidden_size", "n_embd", "d_model") // num_heads
    dtype = _first(config, "dtype", "torch_dtype")
    return ModelShape(
        groups=_groups(config, num_layers),
        num_kv_heads=_kv_heads(config, num_heads),
        head_dim=int(head_dim),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def _kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    given = _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv")
    # Falcon has both keys, and the new architecture ignores `multi_query`.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return num_heads if given is None else _count(config, "num_key_value_heads", "num_kv_heads", "n_head_kv")


def _groups(config: Mapping[str, Any], num_layers: int) -> tuple[LayerGroup, ...]:
    window = config.get("sliding_window")
    slides = _sliding_layers(config, num_layers, window)
    if any(slides) and (not isinstance(window, int) or window < 1):
        raise InvalidArgumentError.of(
            "sliding_window", f"config.json has sliding layers and {window!r} for their window"
        )
    groups = [LayerGroup(slides.count(False), None), LayerGroup(slides.count(True), window)]
    return tuple(group for group in groups if group.num_layers)


def _sliding_layers(config: Mapping[str, Any], num_layers: int, window: object) -> list[bool]:
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, Sequence) or len(types) != num_layers:
            raise InvalidArgumentError.of("layer_types", f"config.json must have one for each of {num_layers} layers")
        unknown = sorted({str(each) for each in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedFeatureError(
                f"config.json: layer_types: {unknown[0]} is not built", metadata={"feature": unknown[0]}
            )
        return [each == "sliding_attention" for each in types]
    if window is None or config.get("use_sliding_window") is False:
        return [False] * num_layers
    if config.get("use_sliding_window"):
        # Qwen2: the first `max_window_layers` attend in full.
        first = int(config.get("max_window_layers") or 0)
        return [layer >= first for layer in range(num_layers)]
    pattern = config.get("sliding_window_pattern") or _PATTERNS.get(str(config.get("model_type")))
    if pattern:
        return [bool((layer + 1) % int(pattern)) for layer in range(num_layers)]
    return [True] * num_layers


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _count(config: Mapping[str, Any], *keys: str) -> int:
    value = _first(config, *keys)
    if value is None:
        raise InvalidArgumentError.of(keys[0], f"config.json has none of {', '.join(keys)}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError.of(keys[0], f"config.json has {value!r}, which is no positive number")
    return value
