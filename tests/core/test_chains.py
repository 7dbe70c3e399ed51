"""Digests of prompts: every quick path must give what the definition gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_driver import Engine, model, pack, small_core
from kvplane.cache.core import Chain
from kvplane.cache.core.chains import Namespaces, extend
from kvplane.wire.digests import ExtraKey, ExtraKeyKind, block_digest, extend_chain, extend_each
from kvplane.wire.errors import InvalidArgumentError, NotFoundError
from kvplane.wire.identity import Digest, Namespace, root_digest

ROOT = root_digest(model(), Namespace(), 0)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7))
def test_a_chain_is_its_blocks_one_after_the_other(tokens: list[int], block_tokens: int) -> None:
    expected, parent = [], ROOT
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = block_digest(parent, pack(tokens[first : first + block_tokens]))
        expected.append(parent)
    assert extend_chain(ROOT, pack(tokens), block_tokens) == expected
    assert extend(Chain(ROOT), pack(tokens), block_tokens).blob == b"".join(expected)


@given(st.integers(0, 6), st.integers(1, 20))
def test_each_of_many_blocks_follows_its_own_parent(rows: int, block_tokens: int) -> None:
    source = np.random.default_rng(rows * 100 + block_tokens)
    parents = source.integers(0, 256, (rows, 32), dtype=np.uint8)
    blocks = source.integers(0, 256, (rows, 4 * block_tokens), dtype=np.uint8)
    expected = [
        block_digest(Digest(parent.tobytes()), block.tobytes()) for parent, block in zip(parents, blocks, strict=True)
    ]
    assert extend_each(parents, blocks, block_tokens) == expected


@given(st.sets(st.integers(0, 6)), st.integers(1, 8))
def test_extra_keys_and_slices_change_nothing_but_their_blocks(keyed: set[int], slice_blocks: int) -> None:
    tokens, key = pack(range(28)), ExtraKey(ExtraKeyKind.MULTIMODAL, b"image", 0)
    keys = dict.fromkeys(keyed, (key,))
    expected, parent = [], ROOT
    for block in range(7):
        parent = block_digest(parent, tokens[16 * block : 16 * block + 16], keys.get(block, ()))
        expected.append(parent)
    chain = Chain(ROOT)
    while len(chain) < 7:
        chain = extend(chain, tokens, 4, keys, max_blocks=slice_blocks)
    assert chain.blob == b"".join(expected)
    assert chain.digests(2, 4) == b"".join(expected[2:4])
    assert chain.parents(0, 3) == ROOT + b"".join(expected[:2])
    assert chain.parents(3, 5) == b"".join(expected[2:4])
    assert chain.cut(3).blob == b"".join(expected[:3])
    assert (chain.digest(-1), chain.digest(6)) == (ROOT, expected[6])


def test_versions_of_a_namespace_only_rise() -> None:
    spaces = Namespaces(model())
    assert spaces.root(0) == ROOT
    assert spaces.raise_version(0) == 1
    assert spaces.root(0) == root_digest(model(), Namespace(), 1)
    with pytest.raises(InvalidArgumentError, match="version"):
        spaces.raise_version(0, 1)
    assert spaces.raise_version(0, 7) == 7
    with pytest.raises(NotFoundError):
        spaces.root(1)
    with pytest.raises(NotFoundError):
        spaces.root(-1)


def test_a_chain_hashed_under_an_old_version_is_hashed_again() -> None:
    core = small_core(20)
    chain = core.hash_prompt(0, pack(range(40)))
    core.reset(0)
    engine = Engine(core)
    first = engine.admit(list(range(40)), chain=chain)
    assert core.lookup(chain) == 0
    assert core.lookup(core.hash_prompt(0, pack(range(40)))) == 32
    engine.finish(first)
