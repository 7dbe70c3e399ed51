"""Identities and digests, against golden vectors and an independent implementation of docs/digests.md."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.wire import digests, tlv
from kvplane.wire.digests import ExtraKey
from kvplane.wire.identity import Digest, ModelIdentity, Namespace, root_digest

VECTORS: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "golden" / "digests.json").read_text())


def lv(tag: int, value: bytes) -> bytes:
    """The encoding of docs/digests.md, written a second time and from the page alone."""
    return bytes([tag]) + len(value).to_bytes(4, "little") + value


def independent_root(vector: dict[str, Any]) -> bytes:
    """Root digest from a JSON vector."""
    model, space = vector["model"], vector["namespace"]
    identity = b"".join(
        [
            lv(0x40, model["weights_revision"].encode()),
            lv(0x41, model["tokenizer_revision"].encode()),
            lv(0x42, model["kv_dtype"].encode()),
            lv(0x43, bytes.fromhex(model["kv_scales_digest"])),
            lv(0x44, model["block_tokens"].to_bytes(4, "little")),
            lv(0x45, model["hash_version"].to_bytes(4, "little")),
        ]
    )
    namespace = b"".join(
        [
            lv(0x50, space["adapter_id"].encode()),
            lv(0x51, space["adapter_revision"].encode()),
            lv(0x52, bytes.fromhex(space["tenant_salt"])),
            lv(0x53, bytes.fromhex(space["sub_salt"])),
        ]
    )
    version = vector["namespace_version"].to_bytes(8, "little")
    return hashlib.sha256(lv(0x01, identity) + lv(0x02, namespace) + lv(0x03, version)).digest()


def independent_block(parent: bytes, block: dict[str, Any]) -> bytes:
    """Digest of one block from JSON."""

    def tokens(tag: int, ids: list[int]) -> bytes:
        return lv(tag, b"".join(number.to_bytes(4, "little") for number in [len(ids), *ids]))

    keys = [
        (key["kind"], bytes.fromhex(key["content"]), key["offset"]) for key in block.get("extra_keys", [])
    ]  # fmt: skip
    message = lv(0x10, parent)
    for kind, content, offset in sorted(keys):
        message += lv(kind, struct.pack("<q", offset) + content)
    message += tokens(0x30, block["tokens"])
    if block.get("lookahead"):
        message += tokens(0x31, block["lookahead"])
    return hashlib.sha256(message).digest()


def ours(vector: dict[str, Any]) -> list[str]:
    """Root and block digests by the library, in hex."""
    model, space = vector["model"], vector["namespace"]
    digest = root_digest(
        ModelIdentity(
            model["weights_revision"],
            model["tokenizer_revision"],
            model["kv_dtype"],
            model["block_tokens"],
            bytes.fromhex(model["kv_scales_digest"]),
            model["hash_version"],
        ),
        Namespace(
            space["adapter_id"],
            space["adapter_revision"],
            bytes.fromhex(space["tenant_salt"]),
            bytes.fromhex(space["sub_salt"]),
        ),
        vector["namespace_version"],
    )
    chain = [digest]
    for block in vector["blocks"]:
        digest = digests.block_digest(
            digest,
            pack(block["tokens"]),
            [
                ExtraKey(key["kind"], bytes.fromhex(key["content"]), key["offset"])
                for key in block.get("extra_keys", [])
            ],
            pack(block.get("lookahead", [])),
        )
        chain.append(digest)
    return [each.hex() for each in chain]


def pack(tokens: list[int]) -> bytes:
    """Packed little-endian u32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: str(vector["name"]))
def test_golden_vectors(vector: dict[str, Any]) -> None:
    """The library and the second implementation both give the published digests."""
    digest = independent_root(vector)
    independent = [digest.hex()]
    for block in vector["blocks"]:
        digest = independent_block(digest, block)
        independent.append(digest.hex())
    assert independent == vector["digests"]
    assert ours(vector) == vector["digests"]


def test_golden_vectors_are_all_different() -> None:
    """Whatever differs between two vectors is in the digest."""
    last = [vector["digests"][-1] for vector in VECTORS["chains"]]
    assert len(set(last)) == len(last) >= 10


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=70),
    st.integers(1, 20),
    st.binary(min_size=32, max_size=32).map(Digest),
)
def test_fast_paths_equal_the_plain_one(tokens: list[int], block_tokens: int, parent: Digest) -> None:
    """`extend_chain` and `extend_each` are `block_digest` applied again and again."""
    chain, digest = [], parent
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        digest = digests.block_digest(digest, pack(tokens[start : start + block_tokens]))
        chain.append(digest)
    assert digests.extend_chain(parent, pack(tokens), block_tokens) == chain
    parents = np.frombuffer(b"".join([parent, *chain][: len(chain)]), np.uint8).reshape(-1, 32)
    blocks = np.frombuffer(pack(tokens[: len(chain) * block_tokens]), np.uint8).reshape(len(chain), 4 * block_tokens)
    assert digests.extend_each(parents, blocks, block_tokens) == chain


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=20)), max_size=6))
def test_fields_decode_to_what_was_encoded(fields: list[tuple[int, bytes]]) -> None:
    """Two different inputs never encode alike, since each decodes to itself."""
    assert list(tlv.fields(b"".join(tlv.field(tag, value) for tag, value in fields))) == fields


def test_a_field_cut_short_is_refused() -> None:
    """Decoding says where the bytes end."""
    whole = tlv.text(7, "abc")
    for length in (1, 4, 6):
        with pytest.raises(ValueError, match="byte"):
            list(tlv.fields(whole[:length]))


@pytest.mark.parametrize(("parent", "tokens"), [(bytes(31), b""), (bytes(32), bytes(6)), (bytes(33), bytes(8))])
def test_what_would_encode_ambiguously_is_refused(parent: bytes, tokens: bytes) -> None:
    """Parents are 32 bytes and tokens whole."""
    with pytest.raises(ValueError, match="parent of"):
        digests.block_digest(Digest(parent), tokens)


def test_an_adapter_span_is_a_key_of_its_own_kind() -> None:
    """Clients cannot give the kind that stands for adapters, and both names count, each by itself."""
    assert digests.ExtraKeyKind.ADAPTER not in digests.CONTENT_KINDS
    assert len({digests.adapter_content(*names) for names in (("ab", ""), ("a", "b"), ("", "ab"))}) == 3
    expected = hashlib.sha256(lv(0x50, b"legal") + lv(0x51, b"3")).digest()
    assert digests.adapter_content("legal", "3") == expected


def test_an_extra_key_of_a_reserved_kind_is_refused() -> None:
    """Tags of tokens and parents cannot be taken by content."""
    with pytest.raises(ValueError, match="0x30 is outside"):
        ExtraKey(0x30, b"x", 0).encode()
