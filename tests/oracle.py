"""What a KV cache must never get wrong, as a model too slow to be wrong: the oracle of all pool tests.

It is told what was asked (steps, seals, ends of sessions) and what was answered, keeps every byte that an
engine would have written, and checks after each event that nobody reads another's bytes (I2), that nothing is
hit before it was sealed (I3) or without its ancestors (I4), that no block changes its occupant while somebody
may still touch it (I9), that each hit is as long as it can be, and that the pool's counts are its own (I1).
A block's content is named by the tokens themselves: no digest, no array and no line is shared with the core.
"""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

Content = tuple[int, ...]
"""Namespace, its version, and all tokens up to a position: what a slot's KV depends on."""


def kv_bytes(tokens: list[int], position: int, layer: int, head: int, num_bytes: int) -> bytes:
    """The bytes that layer and head hold for `position`: any read of any service can be checked with it."""
    prefix = np.array(tokens[: position + 1], "<u4").tobytes()
    salt = np.array([position, layer, head], "<u4").tobytes()
    out = b""
    while len(out) < num_bytes:
        out += blake2b(prefix, key=salt + len(out).to_bytes(4, "little")).digest()
    return out[:num_bytes]


@dataclass
class Tracked:
    """A sequence as its engine sees it."""

    namespace: tuple[int, int]
    tokens: list[int]
    reads: bool
    writes: bool
    max_hit: int
    committed: int = 0
    running: bool = False
    publishes: bool = False
    """What `writes` asked for, until a reset."""
    table: list[tuple[int, int]] = field(default_factory=list)
    """(block, generation), the null block as (0, 0)."""

    def content(self, length: int) -> Content:
        return (*self.namespace, *self.tokens[:length])


@dataclass
class Released:
    """Blocks that a session has given up and may still write behind `committed`."""

    session: int
    until_step: float
    until_drained: int
    committed: int
    first_block: int
    table: list[tuple[int, int]]


@dataclass
class Filled:
    """A full, committed block on its way to be published."""

    block: int
    content: Content
    previous: tuple[int, int]
    """(block, generation) before it in its table."""


class Oracle:
    """Follows one pool of a full-attention group. `AssertionError` says what went wrong."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.size = block_tokens
        self.version = 0
        self.sequences: dict[tuple[int, int], Tracked] = {}
        self.memory: dict[int, list[Any]] = {}
        self.newest: dict[int, int] = {}
        self.index: dict[Content, int] = {}
        self.published: dict[int, Content] = {}
        self.spares: dict[int, int] = {}
        self.released: list[Released] = []
        self.completed: dict[int, int] = {}
        self.copies: dict[int, list[tuple[int, int]]] = {}
        self.filled: list[Filled] = []
        self.sealing: dict[int, list[Filled]] = {}
        self.digests: dict[bytes, Content] = {}

    # Events

    def stepped(self, session: int, step: Any, result: Any) -> None:
        """A step was applied; both are the core's public values, or anything shaped like them."""
        skipped = {(each.operation.name, each.sequence_id) for each in result.skipped}
        for ack in step.transfers:
            self.copies.pop(ack.op_id)
        for sequence in step.drained:
            self.released = [each for each in self.released if each.until_drained != sequence]
        if step.completed_step:
            self.completed[session] = step.completed_step
        lost = {each.sequence_id for each in result.preemptions if each.reason.name == "COPY_FAILED"}
        for sequence in lost:
            self._preempted(session, step.step_id, session, sequence)
        self._tokens(session, step, skipped)
        running = {each.sequence_id for each in result.states if each.state.name == "RUNNING"}
        for fork in step.forks:
            for child in fork.child_ids:
                parent = self.sequences[session, fork.parent_id]
                self.sequences[session, child] = Tracked(
                    parent.namespace, list(parent.tokens), parent.reads, parent.writes, parent.max_hit,
                    parent.committed if child in running else 0, child in running, parent.publishes,
                )  # fmt: skip
        if step.finish is not None:
            for sequence in step.finish.sequence_ids.tolist():
                self._release(session, step.step_id, self.sequences.pop((session, sequence)))
        for admit in step.admit:
            if admit.tokens:
                self.sequences[session, admit.sequence_id] = Tracked(
                    (admit.namespace_id, self.version), np.frombuffer(admit.tokens, "<u4").tolist(),
                    admit.read_cache, admit.write_cache,
                    (1 << 40) if admit.max_hit_tokens is None else admit.max_hit_tokens,
                )  # fmt: skip
        self._tables(session, result, {each.sequence_id: each for each in result.admissions})
        for copy in result.copies:
            destination = (copy.destination_id, copy.destination_generation)
            assert self.memory[copy.source_id][: copy.num_slots].count(None) == 0
            self.memory[copy.destination_id][: copy.num_slots] = self.memory[copy.source_id][: copy.num_slots]
            # The source is pinned, and the chain that leads to it.
            child = next(each.table for each in self.sequences.values() if destination in each.table)
            source = (copy.source_id, copy.source_generation)
            self.copies[copy.op_id] = [*child[: child.index(destination)], source]
        for each in result.preemptions:
            if each.sequence_id not in lost or each.session_id != session:
                self._preempted(session, step.step_id, each.session_id, each.sequence_id)
        self._check()

    def seals_taken(self, batch: Any) -> None:
        """A batch of seals went out: exactly the filled blocks, one digest for one content."""
        assert sorted(batch.block_ids.tolist()) == sorted(each.block for each in self.filled)
        filled = {each.block: each for each in self.filled}
        for at, block in enumerate(batch.block_ids.tolist()):
            assert batch.generations[at] == self.newest[block]
            digest = batch.digests[32 * at : 32 * at + 32]
            content = filled[block].content
            assert self.digests.setdefault(digest, content) == content, "two contents, one digest"
        self.sealing[batch.seal_id] = [filled[block] for block in batch.block_ids.tolist()]
        self.filled = []

    def seals_acknowledged(self, seal_id: int, sealed: list[bool]) -> None:
        """All shards sealed these blocks of a batch."""
        for each, good in zip(self.sealing.pop(seal_id), sealed, strict=True):
            block, content = each.block, each.content
            parent = content[: len(content) - self.size]
            rooted = len(parent) == 2 or (parent in self.index and self._holds(each, self.index[parent]))
            if not good or content[1] != self.version or not rooted:
                continue
            assert self.memory[block] == [content[: len(parent) + slot + 1] for slot in range(self.size)]
            if content in self.index:
                self.spares[block] = self.index[content]
            else:
                self.index[content] = block
                self.published[block] = content
        self._check()

    def reset(self) -> None:
        """All namespaces start a new version."""
        self.version += 1
        self.index.clear()
        self.published.clear()
        for sequence in self.sequences.values():
            if sequence.running:
                sequence.publishes = False
            else:
                sequence.namespace = (sequence.namespace[0], self.version)
        self._check()

    def session_ended(self, session: int) -> None:
        """A lease is over; whatever the session still does counts until it has drained."""
        for key in [key for key in self.sequences if key[0] == session]:
            self._release(session, 1 << 62, self.sequences.pop(key))
        self._check()

    def session_drained(self, session: int, op_ids: list[int]) -> None:
        """Nothing of an ended session runs any more."""
        self.released = [each for each in self.released if each.session != session]
        for op_id in op_ids:
            del self.copies[op_id]
        self._check()

    # What the pool must say about itself

    def counts(self) -> dict[str, int]:
        """Blocks by state."""
        held, deferred = self._held_or_deferred()
        # A spare pins its canonical block for as long as anybody may touch the spare.
        held |= {canonical for spare, canonical in self.spares.items() if spare in held | deferred}
        quarantined = deferred - held
        cached = set(self.published) - held - quarantined
        states = {"held": len(held), "quarantined": len(quarantined), "cached": len(cached)}
        return states | {"free": self.num_blocks - 1 - sum(states.values())}

    # How

    def _tokens(self, session: int, step: Any, skipped: set[tuple[str, int]]) -> None:
        if step.observe is not None:
            tokens = iter(step.observe.tokens.tolist())
            for sequence, count in zip(step.observe.sequence_ids.tolist(), step.observe.counts.tolist(), strict=True):
                self.sequences[session, sequence].tokens += [next(tokens) for _ in range(count)]
        if step.advance is not None:
            rows = zip(step.advance.sequence_ids.tolist(), step.advance.tokens.tolist(),
                       step.advance.num_committed.tolist(), strict=True)  # fmt: skip
            for sequence, token, length in rows:
                self.sequences[session, sequence].tokens.append(token)
                if ("ADVANCE", sequence) not in skipped:
                    self._commit(self.sequences[session, sequence], length)
        for operation, name in ((step.commit, "COMMIT"), (step.rollback, "ROLLBACK")):
            if operation is None:
                continue
            for sequence, length in zip(operation.sequence_ids.tolist(), operation.num_tokens.tolist(), strict=True):
                if (name, sequence) in skipped:
                    continue
                tracked = self.sequences[session, sequence]
                if name == "COMMIT":
                    self._commit(tracked, length)
                else:
                    del tracked.tokens[length:]
                    keep = -(-length // self.size)
                    self._defer(session, step.step_id, tracked, keep)
                    del tracked.table[keep:]

    def _commit(self, tracked: Tracked, length: int) -> None:
        for position in range(tracked.committed, length):
            block, _ = tracked.table[position // self.size]
            self.memory[block][position % self.size] = tracked.content(position + 1)
        for index in range(tracked.committed // self.size, length // self.size):
            if tracked.publishes:
                content = tracked.content((index + 1) * self.size)
                previous = tracked.table[index - 1] if index else (0, 0)
                self.filled.append(Filled(tracked.table[index][0], content, previous))
        tracked.committed = length

    def _holds(self, filled: Filled, parent: int) -> bool:
        """Whoever holds the block holds the canonical parent: in its table, or pinned by the spare there."""
        block, generation = filled.previous
        return self.newest[block] != generation or parent in (block, self.spares.get(block))

    def _tables(self, session: int, result: Any, admissions: dict[int, Any]) -> None:
        for deltas in result.tables:
            blocks = iter(zip(deltas.block_ids.tolist(), deltas.generations.tolist(), strict=True))
            rows = zip(deltas.sequence_ids.tolist(), deltas.starts.tolist(), deltas.counts.tolist(), strict=True)
            for sequence, start, count in rows:
                tracked = self.sequences[session, sequence]
                if not tracked.running and sequence in admissions:
                    hit = admissions[sequence].cached_tokens
                    assert hit == self._longest_hit(tracked), "the hit is not as long as it can be"
                    tracked.committed, tracked.publishes = hit, tracked.writes
                tracked.running = True
                assert start == len(tracked.table), "I5: a table is append-only"
                for _ in range(count):
                    block, generation = next(blocks)
                    if generation != self.newest.get(block):
                        self._new_occupant(block, generation)
                    tracked.table.append((block, generation))

    def _new_occupant(self, block: int, generation: int) -> None:
        assert 0 < block < self.num_blocks
        assert generation > self.newest.get(block, 0), "I2: a generation came back"
        content = self.published.pop(block, None)
        if content is not None:
            del self.index[content]
        self.spares.pop(block, None)
        self.newest[block] = generation
        self.memory[block] = [None] * self.size

    def _longest_hit(self, tracked: Tracked) -> int:
        hit, cap = 0, min(len(tracked.tokens) - 1, tracked.max_hit)
        while tracked.reads and hit + self.size <= cap and tracked.content(hit + self.size) in self.index:
            hit += self.size
        return hit

    def _preempted(self, by: int, step_id: int, session: int, sequence: int) -> None:
        tracked = self.sequences[session, sequence]
        if by == session:
            self._release(session, step_id, tracked)
        else:
            self._defer(session, 1 << 62, tracked, 0, until_drained=sequence)
        tracked.table, tracked.running, tracked.committed = [], False, 0
        tracked.namespace = (tracked.namespace[0], self.version)

    def _release(self, session: int, step_id: int, tracked: Tracked) -> None:
        self._defer(session, step_id, tracked, 0)

    def _defer(self, session: int, step_id: int, tracked: Tracked, first: int, until_drained: int = 0) -> None:
        table = tracked.table[first:]
        if table:
            self.released.append(Released(session, step_id - 1, until_drained, tracked.committed, first, table))

    def _held_or_deferred(self) -> tuple[set[int], set[int]]:
        held = {block for block, _ in self._live()} | {block for pinned in self.copies.values() for block, _ in pinned}
        held |= {each.block for each in self.filled}
        held |= {each.block for batch in self.sealing.values() for each in batch}
        return held, {block for each in self.released for block, _ in each.table} - {0}

    def _live(self) -> list[tuple[int, int]]:
        return [entry for each in self.sequences.values() for entry in each.table if entry[0]]

    def _check(self) -> None:
        self.released = [each for each in self.released if self.completed.get(each.session, 0) < each.until_step]
        # One occupant a block, over all who may still touch it.
        touchable = self._live() + [entry for pinned in self.copies.values() for entry in pinned]
        touchable += [entry for each in self.released for entry in each.table if entry[0]]
        for block, generation in touchable:
            assert generation == self.newest[block], f"I9: block {block} has a new occupant and an old user"
        # Whoever may write, writes: slots behind the committed ones hold anything.
        for each in self.sequences.values():
            self._scribble(each.table, 0, each.committed)
        for gone in self.released:
            self._scribble(gone.table, gone.first_block, gone.committed)
        # And nobody sees it.
        for each in self.sequences.values():
            for position in range(each.committed):
                block, _ = each.table[position // self.size]
                found = self.memory[block][position % self.size] if block else None
                assert block == 0 or found == each.content(position + 1), f"I2: wrong bytes in block {block}"
        for block, content in self.published.items():
            wanted = [content[: len(content) - self.size + slot + 1] for slot in range(self.size)]
            assert self.memory[block] == wanted, f"I2: published block {block} was overwritten"
            parent = content[: len(content) - self.size]
            assert len(parent) == 2 or parent in self.index, f"I4: block {block} lost its parent"
        held = self._held_or_deferred()
        self.spares = {spare: other for spare, other in self.spares.items() if spare in held[0] | held[1]}
        assert all(count == 1 for count in Counter(self.index.values()).values())

    def _scribble(self, table: list[tuple[int, int]], first_block: int, committed: int) -> None:
        for at, (block, _) in enumerate(table):
            for slot in range(self.size):
                if block and (first_block + at) * self.size + slot >= committed:
                    self.memory[block][slot] = "anything"
