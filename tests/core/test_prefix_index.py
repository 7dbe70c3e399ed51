"""The prefix index against a dictionary, with digests that share buckets and leading bytes on purpose."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.cache.core.prefix_index import PrefixIndex

BLOCKS = 24


def digest(key: int) -> bytes:
    """Eight leading bytes that few keys differ in, so that buckets and prefixes collide."""
    return bytes([key % 3]) + bytes(7) + key.to_bytes(24, "little")


EVENTS = st.tuples(st.sampled_from(["insert", "build", "remove"]), st.lists(st.integers(0, 40), max_size=6))


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS))
def test_it_finds_what_a_dictionary_finds(events: list[tuple[str, list[int]]]) -> None:
    digests = np.zeros((BLOCKS, 32), np.uint8)
    index, known = PrefixIndex(digests), dict[bytes, int]()
    free = list(range(1, BLOCKS))
    for event, named in events:
        keys = [key for key in named if event != "build" or digest(key) not in known]
        if event == "remove":
            gone = [known.pop(digest(key)) for key in dict.fromkeys(keys) if digest(key) in known]
            index.remove(np.array(gone, np.int64), remember=True)
            free += gone
            continue
        blocks = np.array([free.pop() for _ in keys[: len(free)]], np.int64)
        wanted = [digest(key) for key in keys[: len(blocks)]]
        for block, each in zip(blocks.tolist(), wanted, strict=True):
            digests[block] = np.frombuffer(each, np.uint8)
        if event == "build":
            kept = index.build(blocks)
            for block, each, good in zip(blocks.tolist(), wanted, kept.tolist(), strict=True):
                if good:
                    assert each not in known
                    known[each] = block
                else:
                    free.append(block)
            assert all(each in known for each in wanted)
        elif index.insert(blocks):
            known.update(zip(wanted, blocks.tolist(), strict=True))
        else:
            # Only a look at the first eight bytes: it may refuse what is new, never accept what is known.
            free += blocks.tolist()
        assert len(index) == len(known)
        everything = [digest(key) for key in range(41)]
        expected = [known.get(each, 0) for each in everything]
        assert [index.find(each) for each in everything] == expected
        assert index.find_all(np.frombuffer(b"".join(everything), np.uint8).reshape(-1, 32)).tolist() == expected


@given(st.integers(0, 40), st.integers(0, 40))
def test_galloping_finds_the_last_published_block(published: int, limit: int) -> None:
    digests = np.random.default_rng(0).integers(0, 256, (64, 32), dtype=np.uint8)
    index = PrefixIndex(digests)
    index.build(np.arange(1, published + 1))
    assert index.longest_prefix(digests[1:].tobytes(), limit) == min(published, limit)
