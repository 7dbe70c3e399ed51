"""A transformers cache that holds nothing: the pool does."""

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class PoolCache(Cache):
    """Passes the new keys and values of a layer through to the attention implementation, which writes them to the pool.

    It never grows, so one serves all forward passes. Positions are given to the model, not derived from it.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002 - the names are transformers'
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """The tensors as they came."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """0: sequences of a flattened batch have lengths of their own, which the plan knows."""
        return 0
