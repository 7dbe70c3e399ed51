"""Next tokens from logits: all greedy rows in one call, the others together, each with a generator of its own."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvplane.client.integrations.transformers.requests import SamplingParams


class Sampler:
    """Draws the tokens of one completion: the same from the same seed and logits, whatever else is in the batch."""

    def __init__(self, params: SamplingParams, index: int) -> None:
        self.params = params
        self._generator = np.random.Generator(np.random.Philox(key=[params.seed % (1 << 64), index]))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature == 0

    def draw(self) -> float:
        """The next number of this completion, in [0, 1)."""
        return float(self._generator.random())


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """One token per row of `logits` [rows, vocabulary]; row i belongs to `samplers[i]`."""
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
    if not drawn:
        return logits.argmax(-1).tolist()
    tokens: list[int] = logits.argmax(-1).tolist() if len(drawn) < len(samplers) else [0] * len(samplers)
    chosen = _draw(logits[drawn].float(), [samplers[row] for row in drawn])
    for row, token in zip(drawn, chosen, strict=True):
        tokens[row] = token
    return tokens


def _draw(logits: Tensor, samplers: list[Sampler]) -> list[int]:
    """Inverse transform sampling on the sorted distribution: token where its cumulated probability passes the draw."""
    params = [sampler.params for sampler in samplers]
    device = logits.device
    temperature = torch.tensor([each.temperature for each in params], device=device)
    most = max(each.top_k for each in params) if all(each.top_k for each in params) else logits.shape[1]
    values, order = (logits / temperature[:, None]).topk(min(most, logits.shape[1]), dim=-1)
    top_k = torch.tensor([each.top_k or values.shape[1] for each in params], device=device)
    values = values.masked_fill(torch.arange(values.shape[1], device=device) >= top_k[:, None], -torch.inf)
    # float64: over a vocabulary the rounding of float32 sums would reach the size of a token's probability.
    probability = torch.softmax(values.double(), -1)
    cumulated = probability.cumsum(-1)
    top_p = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device)
    # A token stays when what is before it does not reach p yet: the first always does.
    kept = cumulated - probability < top_p[:, None]
    total = (probability * kept).sum(-1)
    draws = torch.tensor([sampler.draw() for sampler in samplers], dtype=torch.float64, device=device)
    place = (cumulated <= (draws * total)[:, None]).sum(-1)
    place = torch.minimum(place, (kept & (probability > 0)).sum(-1) - 1)
    return order.gather(1, place[:, None])[:, 0].tolist()
