"""A small engine for tests of the cache core: numbers steps, keeps tables, settles seals."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplane.cache.core import (
    Admission,
    Admit,
    CacheCore,
    CoreConfig,
    Finish,
    FinishReason,
    Fork,
    Lengths,
    Observe,
    SequenceState,
    Session,
    Step,
    StepResult,
)
from kvplane.wire.identity import ModelIdentity

BLOCK = 16


def model(block_tokens: int = BLOCK) -> ModelIdentity:
    """A model identity that differs between tests in its block size only."""
    return ModelIdentity("weights", "tokenizer", "bfloat16", block_tokens)


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as packed little-endian u32."""
    return np.fromiter(tokens, np.uint32).tobytes()


def u64(*values: int) -> npt.NDArray[np.uint64]:
    """Sequence ids as a step carries them."""
    return np.array(values, np.uint64)


def u32(*values: int) -> npt.NDArray[np.uint32]:
    """Lengths as a step carries them."""
    return np.array(values, np.uint32)


def sequence_id(row: int, serial: int = 1) -> int:
    """`serial ‖ row`."""
    return serial << 32 | row


def small_core(num_blocks: int, block_tokens: int = BLOCK, **options: Any) -> CacheCore:
    """A pool without a watermark, as the engines' own tests have it, unless `options` say otherwise."""
    options.setdefault("watermark", 0.0)
    return CacheCore(CoreConfig(num_blocks=num_blocks, model=model(block_tokens), **options))


class Engine:
    """One session. Work completes before the next step is sent, and every answer has been read by then."""

    def __init__(self, core: CacheCore, *, settles: bool = True, max_sequences: int = 64) -> None:
        self.core = core
        self.session: Session = core.open_session(0.0, max_sequences=max_sequences)
        self.settles = settles
        self.now = 0.0
        self.step_id = 0
        self.known: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.generations: dict[int, list[int]] = {}
        self.result: StepResult | None = None
        self._serials: dict[int, int] = {}

    def step(self, **operations: Any) -> StepResult:
        """Send one step, fold its answer into the tables, settle the seals it caused."""
        self.step_id += 1
        operations.setdefault("last_seen_step", self.step_id - 1)
        operations.setdefault("completed_step", operations["last_seen_step"])
        try:
            result = self.core.step(self.session.session_id, Step(self.step_id, **operations), self.now)
        finally:
            self.core.check_integrity()
        for deltas in result.tables:
            at = 0
            for sequence, start, count in zip(
                deltas.sequence_ids.tolist(), deltas.starts.tolist(), deltas.counts.tolist(), strict=True
            ):
                for column, values in (
                    (self.tables, deltas.block_ids),
                    (self.generations, deltas.generations),
                ):
                    table = column.setdefault(sequence, [])
                    table[start : start + count] = values[at : at + count].tolist()
                at += count
        for change in result.states:
            if change.state in (SequenceState.PREEMPTED, SequenceState.FINISHED):
                self.tables.pop(change.sequence_id, None)
                self.generations.pop(change.sequence_id, None)
        if self.settles:
            self.settle()
        self.result = result
        return result

    def settle(self) -> None:
        """All shards seal at once and say so."""
        while (batch := self.core.take_seals()) is not None:
            self.core.acknowledge_seals(batch.seal_id)
        self.core.check_integrity()

    def new_id(self, row: int | None = None) -> int:
        """An unused sequence id, in a given row or the lowest free one."""
        if row is None:
            used = {each & 0xFFFF_FFFF for each in self.known}
            row = next(row for row in range(self.session.max_sequences) if row not in used)
        self._serials[row] = self._serials.get(row, 0) + 1
        return sequence_id(row, self._serials[row])

    def ask(self, tokens: Sequence[int], *, committed: bool = True, **options: Any) -> tuple[int, Admission | None]:
        """Ask for admission of a new sequence; when it runs, its whole prompt is computed and committed."""
        new = self.new_id()
        limits = {key: options.pop(key) for key in ("max_admissions", "max_admitted_tokens") if key in options}
        self.known[new] = len(tokens)
        result = self.step(admit=(Admit(new, pack(tokens), **options),), **limits)
        return new, self._admitted(result, new, committed)

    def ask_again(self, sequence: int, *, committed: bool = True, **options: Any) -> Admission | None:
        """Ask once more for a refused or preempted sequence."""
        return self._admitted(self.step(admit=(Admit(sequence, **options),)), sequence, committed)

    def admit(self, tokens: Sequence[int], **options: Any) -> int:
        """Ask, and expect that it runs."""
        new, admission = self.ask(tokens, **options)
        assert admission is not None, self.result
        return new

    def decode(self, sequence: int, tokens: Sequence[int]) -> StepResult:
        """Observe tokens, reserve their slots, and commit them in the step after."""
        length = self.known[sequence] + len(tokens)
        result = self.step(
            observe=Observe(u64(sequence), u32(len(tokens)), np.array(tokens, np.uint32)),
            extend=Lengths(u64(sequence), u32(length)),
        )
        self.known[sequence] = length
        if len(self.tables.get(sequence, [])) * self.core.config.block_tokens >= length:
            self.commit(sequence, length)
        return result

    def commit(self, sequence: int, length: int) -> None:
        """KV is written up to `length`."""
        self.step(commit=Lengths(u64(sequence), u32(length)))

    def fork(self, parent: int, children: int = 1) -> list[int]:
        """Fork a parent into new children."""
        new: list[int] = []
        for _ in range(children):
            new.append(self.new_id())
            self.known[new[-1]] = self.known[parent]
        self.step(forks=(Fork(parent, tuple(new)),))
        return new

    def finish(self, *sequences: int) -> StepResult:
        """End sequences."""
        for sequence in sequences:
            self.known.pop(sequence, None)
        return self.step(finish=Finish(u64(*sequences), u32(*[int(FinishReason.STOP)] * len(sequences))))

    def _admitted(self, result: StepResult, sequence: int, committed: bool) -> Admission | None:
        for admission in result.admissions:
            if admission.sequence_id == sequence:
                if committed:
                    self.commit(sequence, min(admission.num_slots, self.known[sequence]))
                return admission
        return None


def free_list(core: CacheCore) -> list[int]:
    """Blocks in the order in which they will be taken: free ones, then cached ones by policy."""
    policy: Any = core.state.pool.policy
    return [*core.state.pool.free_order().tolist(), *policy.order().tolist()]


def references(core: CacheCore, blocks: Iterable[int]) -> list[int]:
    """Reference counts of blocks."""
    return [int(core.state.columns.references[block]) for block in blocks]


def published(core: CacheCore, blocks: Iterable[int]) -> list[bool]:
    """Whether each block can be hit."""
    return [bool(core.state.columns.indexed[block]) for block in blocks]
