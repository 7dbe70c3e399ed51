"""The hash chain of blocks: which tokens, after which prefix, under which root.

`digest(i) = SHA-256(parent(i) ‖ extra keys ‖ tokens ‖ lookahead tokens)`, each a tag-length-value field,
`parent(0)` being the namespace's root. Packed u32 tokens and one `hashlib` call a block cost a fifth to a
half of pickled tuples at equal strength, and any language can compute the same digests (see
`tests/contract/golden/digests.json`).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvplane.wire import tlv
from kvplane.wire.identity import DIGEST_BYTES, Digest

U8 = npt.NDArray[np.uint8]

TOKEN_BYTES = 4
"""A token id travels and is hashed as a little-endian u32."""

_PARENT = 0x10
_TOKENS = 0x30
_LOOKAHEAD = 0x31

_ADAPTER_ID = 0x50
_ADAPTER_REVISION = 0x51

_PARENT_HEADER = struct.pack("<BI", _PARENT, DIGEST_BYTES)


class ExtraKeyKind(IntEnum):
    """What an extra key stands for. The values are tags of the encoding; open kinds hash as they come."""

    MULTIMODAL = 0x20
    PROMPT_EMBEDDING = 0x21
    ADAPTER = 0x22
    """Tokens computed under another adapter than the namespace's; see `adapter_content`."""


OPEN_KINDS = range(0x28, 0x30)
"""Kinds that clients may use for content of their own."""

CONTENT_KINDS = frozenset({ExtraKeyKind.MULTIMODAL, ExtraKeyKind.PROMPT_EMBEDDING, *OPEN_KINDS})
"""Kinds that a client may give; adapter spans are encoded by the server."""


def adapter_content(adapter_id: str, adapter_revision: str) -> bytes:
    """Content of an extra key of kind ADAPTER: SHA-256 over both names as length-prefixed fields."""
    return sha256(tlv.text(_ADAPTER_ID, adapter_id) + tlv.text(_ADAPTER_REVISION, adapter_revision)).digest()


@dataclass(frozen=True, slots=True, order=True)
class ExtraKey:
    """Something besides token ids that a block's KV depends on."""

    kind: int
    """Tag of the encoding: `ExtraKeyKind`, or one of `OPEN_KINDS`."""
    content: bytes
    """Hash of the content (an image, a slice of embeddings)."""
    offset: int
    """Where the content begins relative to the block's first token; negative when it began earlier."""

    def encode(self) -> bytes:
        """Raises `ValueError` when the kind is outside the range kept for extra keys."""
        if not 0x20 <= self.kind <= 0x2F:
            raise ValueError(f"extra key kind {self.kind:#x} is outside 0x20..0x2f")
        return tlv.field(self.kind, struct.pack("<q", self.offset) + self.content)


def tokens_header(tag: int, count: int) -> bytes:
    """Everything of a token field but the tokens: tag, length, and the count repeated inside the value."""
    return struct.pack("<BII", tag, TOKEN_BYTES * (count + 1), count)


def block_digest(parent: Digest, tokens: bytes, extra_keys: Sequence[ExtraKey] = (), lookahead: bytes = b"") -> Digest:
    """Digest of one block: `tokens` and `lookahead` are packed little-endian u32.

    Extra keys are hashed in the order (kind, content, offset), so that the caller's order is no part of the
    identity. `lookahead` holds the tokens after the block that a draft model's KV depends on. Raises `ValueError` for
    a parent of another length than 32 and for tokens cut short.
    """
    if len(parent) != DIGEST_BYTES or len(tokens) % TOKEN_BYTES or len(lookahead) % TOKEN_BYTES:
        raise ValueError(f"parent of {len(parent)} bytes, tokens of {len(tokens)}, lookahead of {len(lookahead)}")
    message = _PARENT_HEADER + parent
    for key in sorted(extra_keys):
        message += key.encode()
    message += tokens_header(_TOKENS, len(tokens) // TOKEN_BYTES) + tokens
    if lookahead:
        message += tokens_header(_LOOKAHEAD, len(lookahead) // TOKEN_BYTES) + lookahead
    return Digest(sha256(message).digest())


def extend_chain(parent: Digest, tokens: bytes | memoryview, block_tokens: int) -> list[Digest]:
    """Digests of all whole blocks of `tokens` (packed little-endian u32) behind `parent`, without extra keys.

    The hot path of hashing: a tail shorter than a block is left out.
    """
    size = TOKEN_BYTES * block_tokens
    middle = tokens_header(_TOKENS, block_tokens)
    head, hash_of = _PARENT_HEADER, sha256
    digests: list[Digest] = []
    append = digests.append
    digest: bytes = parent
    # Unpacking whole blocks costs a third of slicing them.
    for (block,) in struct.iter_unpack(f"{size}s", memoryview(tokens)[: len(tokens) // size * size]):
        digest = hash_of(head + digest + middle + block).digest()
        append(Digest(digest))
    return digests


def extend_each(parents: U8, blocks: U8, block_tokens: int) -> list[Digest]:
    """Digest of one whole block behind each of many parents: what a decode step needs, no chain inside.

    `parents` [n, 32] are digests, `blocks` [n, 4 * block_tokens] packed little-endian u32.
    """
    middle = _PARENT_HEADER + bytes(DIGEST_BYTES) + tokens_header(_TOKENS, block_tokens)
    first, size = len(_PARENT_HEADER), len(middle) + TOKEN_BYTES * block_tokens
    messages: U8 = np.empty((len(parents), size), np.uint8)
    messages[:, : len(middle)] = np.frombuffer(middle, np.uint8)
    messages[:, first : first + DIGEST_BYTES] = parents
    messages[:, len(middle) :] = blocks
    hash_of = sha256
    return [Digest(hash_of(message).digest()) for (message,) in struct.iter_unpack(f"{size}s", messages.tobytes())]
