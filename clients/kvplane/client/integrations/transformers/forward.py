"""A forward pass of the model over a batch, and the tokens that follow from it."""

from collections.abc import Sequence as Places
from typing import Any

import numpy as np
import torch

from kvplane.client.compute import Compute
from kvplane.client.integrations.transformers.attention import PlannedContext
from kvplane.client.integrations.transformers.batch import Batch
from kvplane.client.integrations.transformers.cache import PoolCache
from kvplane.client.integrations.transformers.model import LoadedModel
from kvplane.client.integrations.transformers.sampling import Sampler, sample


class ForwardPass:
    """Runs batches. Logits are computed for the rows that a token is sampled from, and for no other."""

    def __init__(self, model: LoadedModel, compute: Compute) -> None:
        self._module: Any = model.module
        self._device = model.module.device
        self._shape = model.attention
        self._compute = compute
        self._cache = PoolCache()
        self.written = False
        """Whether slots of the newest batch may be written for good: when it failed, they take no second write."""

    def run(self, batch: Batch, places: Places[int], samplers: Places[Sampler]) -> list[int]:
        """Compute a batch; returns a token for each of `samplers`, drawn from the sampled row at `places[i]`.

        Then the batch's tokens are in the pool, and its sequences know. Raises what `Compute.plan` and a plan's `run`
        raise; the sequences are as before then, see `written`.
        """
        self.written = False
        shape = self._shape
        rows = batch.sample_rows if len(places) == len(batch.sample_rows) else batch.sample_rows[np.asarray(places)]
        with (
            torch.inference_mode(),
            self._compute.plan(
                batch.sequence_ids,
                batch.query_lengths,
                batch.kv_lengths,
                num_query_heads=shape.num_heads,
                scale=shape.scale,
                soft_cap=shape.soft_cap,
                windows=shape.windows,
            ) as plan,
        ):
            context, final = PlannedContext(plan, shape), self._compute.final_layer
            try:
                output = self._module(
                    input_ids=self._tensor(batch.tokens),
                    position_ids=self._tensor(batch.positions),
                    cache=self._cache,
                    use_cache=True,
                    logits_to_keep=torch.from_numpy(rows).to(self._device),
                    kvplane=context,
                )
                tokens = sample(output.logits[0], samplers) if len(rows) else []
            finally:
                self.written = final is not None and context.last_layer >= final
        for sequence, length in zip(batch.sequences, batch.kv_lengths.tolist(), strict=True):
            sequence.computed = length
        return tokens

    def drain(self) -> None:
        """Ask the shards once more where a stream broke before they had said that a plan is closed: without an answer
        its step never counts as completed. Raises what `Compute.plan` raises."""
        self._compute.plan([], [], [], num_query_heads=self._shape.num_heads, scale=self._shape.scale).close()

    def _tensor(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device).unsqueeze(0)
