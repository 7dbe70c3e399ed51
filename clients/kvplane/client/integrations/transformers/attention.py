"""The attention implementation "kvplane": keys and values go to the pool, and the pool's blocks are attended.

A model calls it through transformers' `AttentionInterface` with the new tokens of all sequences of a batch flattened
into one row: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]. What belongs to which
sequence stands in the plan, which travels as the keyword `kvplane` of the forward pass. No mask is built: transformers
builds none for an implementation without a mask function, and the plan is causal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from kvplane.wire.errors import InvalidArgumentError, UnsupportedFeatureError

IMPLEMENTATION = "kvplane"
"""Name for `attn_implementation`."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a model asks of one layer's attention, besides its tensors."""

    scale: float
    soft_cap: float | None
    window: int | None
    """Tokens that a token sees, itself included; None for all before it."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How a model attends: found out once by `kvplane.client.integrations.transformers.support.probe`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None
    windows: Mapping[int, int]
    """Sliding window of each layer that has one."""

    def call(self, layer: int) -> LayerCall:
        """What the plan of a batch does in a layer."""
        return LayerCall(self.scale, self.soft_cap, self.windows.get(layer))


class AttentionContext(Protocol):
    """What carries a forward pass: the keyword `kvplane`."""

    def attend(self, layer: int, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] -> as query."""
        ...


class LayerPlan(Protocol):
    """What a batch's plan does for one layer (`kvplane.client.compute`)."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values, then attend."""
        ...


class PlannedContext:
    """A forward pass over the plan of a batch. Refuses a layer that asks for something else than was planned."""

    def __init__(self, plan: LayerPlan, shape: AttentionShape) -> None:
        self._plan = plan
        self._expected = [shape.call(layer) for layer in range(shape.num_layers)]
        self.last_layer = -1
        """Newest layer whose run was begun."""

    def attend(self, layer: int, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As the protocol says. Raises `UnsupportedFeatureError`."""
        if call != self._expected[layer]:
            raise UnsupportedFeatureError(f"layer {layer} asks for {call}, planned was {self._expected[layer]}")
        self.last_layer = layer
        return self._plan.run(layer, query, key, value)


def register() -> None:
    """Make the implementation known to transformers; again does no harm."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kvplane: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer of a forward pass; returns ([1, tokens, heads, head_dim], None).

    Raises `InvalidArgumentError` without a context or with a batch dimension, and `UnsupportedFeatureError` for what
    the kernels do not have.
    """
    if kvplane is None or query.shape[0] != 1:
        raise InvalidArgumentError.of("kvplane", "a forward pass needs a context and flattened inputs [1, tokens]")
    if attention_mask is not None or dropout or others.get("s_aux") is not None:
        raise UnsupportedFeatureError("masks, dropout and attention sinks are not built")
    call = LayerCall(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window)
    layer: Any = module.layer_idx
    out = kvplane.attend(layer, call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return out.unsqueeze(0), None
