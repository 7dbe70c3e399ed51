"""The hash chain of a prompt, and the roots it may start from.

A chain is immutable once hashed: forks and preempted sequences share it. Hashing is resumable, so that a
caller can cut a long prompt into slices before the atomic part of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvplane.cache.core.arrays import U8
from kvplane.wire.digests import TOKEN_BYTES, ExtraKey, block_digest, extend_chain
from kvplane.wire.errors import InvalidArgumentError, NotFoundError
from kvplane.wire.identity import DIGEST_BYTES, Digest, ModelIdentity, Namespace, root_digest


@dataclass(frozen=True, slots=True)
class Chain:
    """Digests of a prompt's whole blocks behind the root of its namespace."""

    root: Digest
    blob: bytes = b""
    """The digests, 32 bytes each, in block order."""

    def __len__(self) -> int:
        return len(self.blob) // DIGEST_BYTES

    def digest(self, index: int) -> Digest:
        """Digest of block `index`; the root for -1."""
        if index < 0:
            return self.root
        return Digest(self.blob[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)])

    def digests(self, first: int, end: int) -> bytes:
        """Digests of blocks `first` to `end - 1`."""
        return self.blob[DIGEST_BYTES * first : DIGEST_BYTES * end]

    def parents(self, first: int, end: int) -> bytes:
        """Parent digests of blocks `first` to `end - 1`."""
        if first:
            return self.digests(first - 1, end - 1)
        return (self.root + self.blob)[: DIGEST_BYTES * end]

    def array(self, count: int) -> U8:
        """The first `count` digests as rows [count, 32]."""
        return np.frombuffer(self.blob, np.uint8, DIGEST_BYTES * count).reshape(count, DIGEST_BYTES)

    def cut(self, num_blocks: int) -> "Chain":
        """The chain of the first `num_blocks` blocks."""
        return Chain(self.root, self.digests(0, num_blocks)) if num_blocks < len(self) else self


def extend(
    chain: Chain,
    tokens: bytes,
    block_tokens: int,
    extra_keys: Mapping[int, tuple[ExtraKey, ...]] | None = None,
    max_blocks: int | None = None,
) -> Chain:
    """`chain` continued over the whole blocks of `tokens` (packed u32, from the sequence's first token).

    Stops after `max_blocks` more blocks: call again with the result to go on.
    """
    size = TOKEN_BYTES * block_tokens
    first, end = len(chain), len(tokens) // size
    if max_blocks is not None:
        end = min(end, first + max_blocks)
    if end <= first:
        return chain
    parent = chain.digest(first - 1)
    parts = [chain.blob]
    keyed = sorted(index for index in extra_keys or () if first <= index < end)
    for index in [*keyed, end]:
        digests = extend_chain(parent, tokens[size * first : size * index], block_tokens)
        parts += digests
        parent = digests[-1] if digests else parent
        if index < end and extra_keys:
            parent = block_digest(parent, tokens[size * index : size * (index + 1)], extra_keys[index])
            parts.append(parent)
        first = index + 1
    return Chain(chain.root, b"".join(parts))


class Namespaces:
    """Registered namespaces and the root of each one's current version."""

    def __init__(self, model: ModelIdentity) -> None:
        self._model = model
        self._ids: dict[Namespace, int] = {}
        self._namespaces: list[Namespace] = []
        self._versions: list[int] = []
        self._roots: list[Digest] = []
        self.register(Namespace())

    def __len__(self) -> int:
        return len(self._roots)

    def __contains__(self, namespace: Namespace) -> bool:
        return namespace in self._ids

    def register(self, namespace: Namespace, version: int = 0) -> int:
        """`namespace_id` of a namespace; the same one when it is registered already. 0 is the plain one."""
        known = self._ids.get(namespace)
        if known is not None:
            return known
        self._ids[namespace] = len(self._namespaces)
        self._namespaces.append(namespace)
        self._versions.append(version)
        self._roots.append(root_digest(self._model, namespace, version))
        return len(self._roots) - 1

    def restore(self, namespaces: Sequence[tuple[Namespace, int]]) -> None:
        """Namespaces with their versions, in the order of their ids, in place of all that are registered."""
        self._ids.clear()
        for entries in (self._namespaces, self._versions, self._roots):
            entries.clear()
        for namespace, version in namespaces:
            self.register(namespace, version)

    def root(self, namespace_id: int, field: str = "namespace_id") -> Digest:
        """Root digest of the current version. Raises `NotFoundError` for an unknown id."""
        if not 0 <= namespace_id < len(self._roots):
            raise NotFoundError(f"{field}: namespace {namespace_id} is not registered")
        return self._roots[namespace_id]

    def identity(self, namespace_id: int) -> bytes:
        """Canonical encoding of a namespace."""
        self.root(namespace_id)
        return self._namespaces[namespace_id].encode()

    def chain(self, namespace_id: int) -> Chain:
        """The empty chain of a namespace's current version."""
        return Chain(self.root(namespace_id))

    def version(self, namespace_id: int) -> int:
        """Current version."""
        self.root(namespace_id)
        return self._versions[namespace_id]

    def raise_version(self, namespace_id: int, version: int | None = None) -> int:
        """Start a new version (the next one, or a given higher one): nothing older can be hit again."""
        current = self.version(namespace_id)
        version = current + 1 if version is None else version
        if not current < version < 1 << 32:
            raise InvalidArgumentError.of("version", f"must be above {current} and a u32")
        self._versions[namespace_id] = version
        self._roots[namespace_id] = root_digest(self._model, self._namespaces[namespace_id], version)
        return version
