"""The tokens of one forward pass, flattened: rows of all sequences one after the other, and where each belongs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvplane.client.integrations.transformers.sequence import Sequence

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Which tokens of which sequences; made by `flatten`."""

    sequences: list[Sequence]
    sequence_ids: list[int]
    query_lengths: I64
    """Tokens of each sequence, shape [sequences]."""
    kv_lengths: I64
    """Tokens of each sequence that are in the pool afterwards, shape [sequences]."""
    tokens: I64
    """Token ids, shape [tokens]."""
    positions: I64
    """Position of each token in its sequence, shape [tokens]."""
    sampling: list[Sequence]
    """Sequences whose last known token is in the batch: the next one is sampled."""
    sample_rows: I64
    """Row of that token, parallel to `sampling`."""


def flatten(sequences: list[Sequence], counts: list[int]) -> Batch:
    """The next `counts[i]` tokens of `sequences[i]`, behind its computed ones."""
    lengths = np.array(counts, np.int64)
    starts = np.array([sequence.computed for sequence in sequences], np.int64)
    ends = starts + lengths
    last_rows = lengths.cumsum() - 1
    if len(counts) == int(last_rows[-1]) + 1:
        tokens = np.array([each.tokens[each.computed] for each in sequences], np.int64)
        positions = starts
    else:
        parts = [
            each.tokens[each.computed : each.computed + count] for each, count in zip(sequences, counts, strict=True)
        ]
        tokens = np.concatenate(parts)
        positions = np.arange(len(tokens)) - np.repeat(last_rows + 1 - lengths - starts, lengths)
    whole = [place for place, each in enumerate(sequences) if each.computed + counts[place] == each.known]
    return Batch(
        sequences=sequences,
        sequence_ids=[each.sequence_id for each in sequences],
        query_lengths=lengths,
        kv_lengths=ends,
        tokens=tokens,
        positions=positions,
        sampling=[sequences[place] for place in whole],
        sample_rows=last_rows[whole],
    )
