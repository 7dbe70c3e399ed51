"""Everything the core can say has a word on the wire."""

from enum import IntEnum

import pytest

from kvplane.cache.core import HitReason, Operation, Reason, SequenceState
from kvplane.cache.service import encode


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SequenceState, encode.STATES),
        (Reason, encode.REASONS),
        (HitReason, encode.HIT_REASONS),
        (Operation, encode.OPERATIONS),
    ],
)
def test_every_value_of_the_core_is_translated(kind: type[IntEnum], words: dict[IntEnum, int]) -> None:
    """A value without a word would end a stream; two of one word could not be told apart."""
    assert set(words) == set(kind)
    assert len(set(words.values())) == len(words)
