"""Which models can run on the pool: found out by asking the model, not by a list of names.

`probe` runs one token through the model and records what each layer asks of its attention. What a model would do by a
mask (chunked or bidirectional attention, packed images) never reaches the attention function, so it is looked up in the
configuration and refused there.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvplane.client.integrations.transformers.attention import IMPLEMENTATION, AttentionShape, LayerCall, register
from kvplane.client.integrations.transformers.cache import PoolCache
from kvplane.wire.errors import UnsupportedFeatureError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_HEAD_DIM_MULTIPLE = 16


class _Recorder:
    """Records calls; the output is zeros."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}
        self.shapes: set[tuple[int, int, int, int]] = set()

    def attend(self, layer: int, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.calls:
            raise UnsupportedFeatureError(f"layer {layer} attends twice in a forward pass")
        self.calls[layer] = call
        self.shapes.add((query.shape[1], key.shape[1], query.shape[2], value.shape[2]))
        return torch.zeros_like(query)


def probe(model: PreTrainedModel) -> AttentionShape:
    """How the model attends; switches it to the implementation. Raises `UnsupportedFeatureError` that says why not."""
    _check_configuration(model)
    register()
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError) as error:
        raise UnsupportedFeatureError(f"{type(model).__name__}: {error}") from error
    recorder = _Recorder()
    zeros = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=zeros, position_ids=zeros, cache=PoolCache(), use_cache=True, kvplane=recorder)
    return _shape(model, recorder)


def _check_configuration(model: PreTrainedModel) -> None:
    config: Any = model.config
    name = type(model).__name__
    if not model.can_generate() or config.is_encoder_decoder or not getattr(config, "is_causal", True):
        raise UnsupportedFeatureError(f"{name} is no causal decoder")
    if config.get_text_config() is not config:
        raise UnsupportedFeatureError(f"{name} has inputs besides text; load its language model")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedFeatureError(f"{name} does not let its attention be replaced")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds or getattr(config, "attention_chunk_size", None):
        raise UnsupportedFeatureError(f"{name} has layers of kind {', '.join(sorted(kinds)) or 'chunked_attention'}")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedFeatureError(f"{name} attends in both directions")


def _shape(model: PreTrainedModel, recorder: _Recorder) -> AttentionShape:
    name, config = type(model).__name__, model.config
    layers = len(recorder.calls)
    if (
        layers == 0
        or set(recorder.calls) != set(range(layers))
        or layers != getattr(config, "num_hidden_layers", layers)
    ):
        raise UnsupportedFeatureError(f"{name}: {layers} layers use the attention interface, not all")
    common = {(call.scale, call.soft_cap) for call in recorder.calls.values()}
    if len(common) != 1 or len(recorder.shapes) != 1:
        raise UnsupportedFeatureError(f"{name}: layers differ in scale, soft cap or shape: {common}, {recorder.shapes}")
    ((scale, soft_cap),) = common
    ((heads, kv_heads, head_dim, value_dim),) = recorder.shapes
    if head_dim != value_dim or head_dim % _HEAD_DIM_MULTIPLE:
        limit = f"equal head dimensions, multiples of {_HEAD_DIM_MULTIPLE}"
        raise UnsupportedFeatureError(f"{name}: {limit} expected, got {head_dim} for keys and {value_dim} for values")
    windows = {layer: call.window for layer, call in recorder.calls.items() if call.window is not None}
    kinds = getattr(config, "layer_types", None)
    if kinds and {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"} != set(windows):
        raise UnsupportedFeatureError(f"{name} has sliding layers that do not say their window")
    return AttentionShape(layers, heads, kv_heads, head_dim, scale, soft_cap, windows)
