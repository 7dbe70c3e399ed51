"""From the partial results of a row's splits to its output."""

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.addressing import address_of
from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.memory import fetch_add
from kvplane.kernels.cpu.narrow import MINUS_INFINITY


@jit
def merge_partials(
    tokens: NDArray[np.int64],
    counter: NDArray[np.int64],
    partial_output: NDArray[np.float32],
    partial_lse: NDArray[np.float32],
    sinks: NDArray[np.float32],
    output: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:
    """Weigh each row's partials by exp(LSE) in the order of its splits; without any: 0 and LSE -inf.

    `sinks` [heads], or none: logits without a value.
    """
    heads = output.shape[1]
    dim = output.shape[2]
    while True:
        token = fetch_add(address_of(counter), 1)
        if token >= tokens.shape[0]:
            return
        first = tokens[token, 2]
        count = tokens[token, 4]
        for head in range(heads):
            top = MINUS_INFINITY
            for i in range(first, first + count):
                top = max(top, partial_lse[i, head])
            safe = top if top > MINUS_INFINITY else np.float32(0)
            total = np.float32(0)
            for d in range(dim):
                output[token, head, d] = 0
            for i in range(first, first + count):
                weight = np.exp(partial_lse[i, head] - safe)
                total += weight
                if weight != 0:
                    for d in range(dim):
                        output[token, head, d] += weight * partial_output[i, head, d]
            seen = total > 0 or total != total
            shrink = np.float32(1)
            if seen and sinks.shape[0] > 0:
                with_sink = max(safe, sinks[head])
                shrink = np.exp(safe - with_sink)
                total = total * shrink + np.exp(sinks[head] - with_sink)
                safe = with_sink
            inverse = shrink / total if seen else np.float32(0)
            for d in range(dim):
                output[token, head, d] *= inverse
            lse[token, head] = safe + np.log(total) if seen else MINUS_INFINITY
