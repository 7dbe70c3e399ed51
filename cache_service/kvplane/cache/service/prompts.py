"""Long prompts are hashed in slices before the step that admits them, so that no other session waits for it."""

from collections.abc import Mapping, Sequence

from kvplane.cache.core import Chain
from kvplane.cache.service.decode import Surroundings, decode_sequence
from kvplane.cache.service.pools import HostedPool
from kvplane.cache.service.sessions import EngineSession
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.digests import ExtraKey
from kvplane.wire.errors import KvplaneError

HASH_SLICE_BLOCKS = 128
"""Blocks hashed between two chances for other sessions."""


class LongPrompt:
    """A prompt hashed in slices of `HASH_SLICE_BLOCKS`."""

    def __init__(
        self,
        pool: HostedPool,
        sequence_id: int,
        namespace_id: int,
        tokens: bytes,
        extra_keys: Mapping[int, tuple[ExtraKey, ...]],
    ) -> None:
        self.sequence_id = sequence_id
        self.chain: Chain | None = None
        self._pool = pool
        self._arguments = (namespace_id, tokens, dict(extra_keys))

    def hash_slice(self) -> bool:
        """Hash the next slice; False when there is nothing left to hash."""
        core = self._pool.core
        if core is None:
            return False
        before = len(self.chain) if self.chain is not None else 0
        try:
            self.chain = core.hash_prompt(*self._arguments, self.chain, HASH_SLICE_BLOCKS)
        except KvplaneError:
            return False  # whoever asked will be told by the call itself
        return len(self.chain) - before == HASH_SLICE_BLOCKS


def long_prompts(
    pool: HostedPool, session: EngineSession, sequences: Sequence[step_pb2.NewSequence], max_tokens: int
) -> list[LongPrompt]:
    """Prompts that are worth hashing ahead: all of a step's, when together they are longer than a slice."""
    if pool.core is None or not pool.core.config.prefix_caching:
        return []
    if sum(len(sequence.tokens) for sequence in sequences) <= 4 * HASH_SLICE_BLOCKS * pool.template.model.block_tokens:
        return []
    around = Surroundings(pool.template.model.block_tokens, session.namespace_id)
    found = []
    for sequence in sequences:
        if len(sequence.tokens) <= 4 * max_tokens:
            try:
                admit = decode_sequence(sequence, "prompt", around)
            except KvplaneError:
                continue  # whoever asked will be told by the call itself, with the field named
            found.append(LongPrompt(pool, admit.sequence_id, admit.namespace_id, admit.tokens, admit.extra_keys))
    return found


def prompt_sequence(prompt: types_pb2.Prompt) -> step_pb2.NewSequence:
    """A prompt in the form of a sequence, so that one decoder reads both."""
    return step_pb2.NewSequence(
        sequence_id=1,
        tokens=prompt.tokens,
        namespace_id=prompt.namespace_id,
        content=prompt.content,
        adapters=prompt.adapters,
    )
