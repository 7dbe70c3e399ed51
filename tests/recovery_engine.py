"""An engine that outlives the cache service: it keeps its tables and says what it holds when the service is back."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import KvplaneError
from kvplane.wire.interface import CacheControl
from service_rig import wait_until
from tensorless_shard import TensorlessShard
from wire_engine import BLOCK, WireEngine, ids, numbers, u32, u64

Block = tuple[int, int]
"""Id and generation."""


@dataclass
class Held:
    """A sequence as its engine knows it."""

    tokens: list[int]
    prompt: int
    committed: int = 0
    table: list[Block] = field(default_factory=list)
    running: bool = False


def block_list(blocks: Iterable[Block]) -> types_pb2.BlockList:
    """Blocks on the wire."""
    blocks = list(blocks)
    return types_pb2.BlockList(block_ids=u32(block for block, _ in blocks), generations=u64(mark for _, mark in blocks))


class RecoveringEngine(WireEngine):
    """One session of either mode. `shards` are stamped and granted as if the engine ran on them."""

    def __init__(self, control: CacheControl, shards: Iterable[TensorlessShard] = (), **options: Any) -> None:
        self.shards = list(shards)
        self.held: dict[int, Held] = {}
        self.cuts: dict[int, tuple[int, str]] = {}
        self.deferred: list[tuple[int, list[Block]]] = []
        self._mode = options.get("mode", types_pb2.SESSION_MODE_ATTACHED)
        super().__init__(control, **options)

    def step(self, **operations: Any) -> step_pb2.StepResult:
        """Send a step, wait for its result, keep what it changes."""
        step = self.request(**operations)
        self.told(step)
        self.send(step)
        result = self.receive()
        self.answered(step, result)
        return result

    def told(self, step: step_pb2.Step) -> None:
        """A step is on its way: what it says is the engine's truth whether it is answered or not."""
        for new in step.admit.sequences:
            tokens = numbers(new.tokens)
            self.held[new.sequence_id] = Held(tokens, len(tokens))
        rows = zip(ids(step.commit.sequence_ids), numbers(step.commit.num_tokens), strict=True)
        for sequence, length in rows:
            self.held[sequence].committed = length
        advance = step.advance
        tokens = numbers(advance.tokens)
        for index, (sequence, length) in enumerate(
            zip(ids(advance.sequence_ids), numbers(advance.num_committed), strict=True)
        ):
            self.held[sequence].tokens.append(tokens[index])
            self.held[sequence].committed = length
        for sequence in ids(step.finish.sequence_ids):
            gone = self.held.pop(sequence)
            if gone.table:
                self.deferred.append((step.step_id - 1, gone.table))

    def answered(self, step: step_pb2.Step, result: step_pb2.StepResult, stamp: bool = True) -> None:
        """An answer was acted on: tables grow, and the engine launches work on them unless `stamp` is off."""
        deltas = list(result.table_deltas)
        if result.HasField("grant"):
            body = step_pb2.GrantBody.FromString(result.grant.body)
            deltas += body.table_deltas
        for delta in deltas:
            blocks = iter(zip(numbers(delta.blocks.block_ids), ids(delta.blocks.generations), strict=True))
            for sequence, start, count in zip(
                ids(delta.sequence_ids), numbers(delta.starts), numbers(delta.counts), strict=True
            ):
                held = self.held[sequence]
                held.running = True
                held.table[start : start + count] = [next(blocks) for _ in range(count)]
        for sequence, (cached, _) in self.admitted().items():
            self.held[sequence].committed = cached
        for sequence, (state, _) in self.states().items():
            if state == "PREEMPTED" and sequence in self.held and self.held[sequence].running:
                gone = self.held[sequence]
                self.deferred.append((step.step_id - 1, gone.table))
                gone.table, gone.running, gone.committed = [], False, 0
        if stamp:
            self.launch()

    def launch(self) -> None:
        """Stamp everything in the tables, and have the shards know the grants."""
        for sequence, held in self.held.items():
            for shard in self.shards:
                if held.table:
                    blocks, marks = zip(*held.table, strict=True)
                    shard.stamp(np.array(blocks), np.array(marks, np.uint64))
                if self._mode == types_pb2.SESSION_MODE_REMOTE:
                    shard.granted[self.session_id, sequence] = list(held.table)

    # After a restart

    def resume(self, control: CacheControl, seconds: float = 10.0) -> cache_pb2.OpenSessionResponse:
        """Ask with the token until the service has read what its shards hold."""
        self.control = control
        request = cache_pb2.OpenSessionRequest(pool_id="default", resume_token=self.opened.resume_token)
        found: list[cache_pb2.OpenSessionResponse] = []

        def opened() -> bool:
            try:
                found.append(control.open_session(request))
            except KvplaneError as error:
                if error.retry_after_seconds is None:
                    raise
                return False
            return True

        wait_until(opened, "the session is resumed", seconds)
        self.opened = found[0]
        self.last_seen_notice = 0
        return found[0]

    def declared(self) -> list[cache_pb2.DeclaredSequence]:
        """What it holds."""
        return [
            cache_pb2.DeclaredSequence(
                sequence=step_pb2.NewSequence(sequence_id=sequence, tokens=u32(held.tokens)),
                num_prompt_tokens=held.prompt,
                num_committed=held.committed,
                table=[block_list(held.table)] if held.table else [],
                state=step_pb2.SEQUENCE_STATE_RUNNING if held.running else step_pb2.SEQUENCE_STATE_PREEMPTED,
            )
            for sequence, held in self.held.items()
        ]

    def declare(self, parts: int = 1, completed: int | None = None, **changes: Any) -> cache_pb2.DeclarationResult:
        """Say what it holds on a new stream, and act on the cuts."""
        opened = self.open_stream()
        assert opened.declaration_required
        sequences = changes.pop("sequences", None) or self.declared()
        deferred = [
            cache_pb2.DeferredBlocks(blocks=block_list(blocks), step_id=max(step_id, 1))
            for step_id, blocks in self.deferred
        ]
        size = -(-len(sequences) // parts) or 1
        for part in range(parts):
            last = part == parts - 1
            self.stream.send(
                cache_pb2.StepRequest(
                    declaration=cache_pb2.Declaration(
                        sequences=sequences[part * size : (part + 1) * size],
                        deferred=deferred if last else [],
                        last_sent_step=self.step_id if last else 0,
                        completed_steps=u64([self.step_id if completed is None else completed]) if last else b"",
                        last=last,
                    )
                )
            )
        response = self.receive_declared()
        self.act_on(response)
        return response

    def receive_declared(self) -> cache_pb2.DeclarationResult:
        """The answer; notices on the way are kept."""
        while True:
            response = self.stream.receive()
            if response.HasField("declared"):
                return response.declared
            assert response.HasField("notice"), response
            self.notices.append(response.notice)
            self.last_seen_notice = response.notice.notice_id

    def act_on(self, result: cache_pb2.DeclarationResult) -> None:
        """Cut what is cut."""
        self.seen = self.step_id
        self.cuts = {
            sequence: (tokens, _name(cache_pb2.CutReason, reason))
            for sequence, tokens, reason in zip(
                ids(result.cut_sequence_ids), numbers(result.cut_tokens), numbers(result.cut_reasons), strict=True
            )
        }
        for sequence, (tokens, _) in self.cuts.items():
            held = self.held.get(sequence)
            if held is not None:
                held.table = held.table[: tokens // BLOCK]
                held.committed = min(held.committed, tokens)
                held.running = bool(held.table)
        if result.HasField("grant"):
            body = step_pb2.GrantBody.FromString(result.grant.body)
            assert body.reset
            tables = dict(self.granted(body))
            assert tables == {sequence: held.table for sequence, held in self.held.items() if held.table}

    @staticmethod
    def granted(body: step_pb2.GrantBody) -> Iterable[tuple[int, list[Block]]]:
        """Tables of a reset grant."""
        for delta in body.table_deltas:
            blocks = iter(zip(numbers(delta.blocks.block_ids), ids(delta.blocks.generations), strict=True))
            for sequence, count in zip(ids(delta.sequence_ids), numbers(delta.counts), strict=True):
                yield sequence, [next(blocks) for _ in range(count)]

    def come_back(self, control: CacheControl, **options: Any) -> cache_pb2.DeclarationResult:
        """Resume and declare."""
        assert self.resume(control).declaration_required
        return self.declare(**options)


def _name(enum: Any, number: int) -> str:
    name: str = enum.Name(number)
    return name.removeprefix("CUT_REASON_")
