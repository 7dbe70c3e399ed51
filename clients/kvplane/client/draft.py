"""A step that is being put together: one scheduler iteration in arrays."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvplane.client.values import FinishReason
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.errors import InvalidArgumentError, LimitExceededError, PreconditionError
from kvplane.wire.packed import U32Array, U64Array, pack_u32

Integers = npt.ArrayLike


class Rows(Protocol):
    """Where ids of new sequences come from."""

    def new_id(self) -> int:
        """An id in a free row."""
        ...

    def give_back(self, sequence_id: int) -> None:
        """The service does not know this id."""
        ...


class StepDraft:
    """Operations of one step. All lengths are absolute token counts.

    Made by `Session.draft()` and sent once, or given up with `discard`: its new sequences take rows until then. Arrays
    of one call are parallel; single numbers are arrays of one.
    Raises `InvalidArgumentError` for what fits no step whatever its state; the rest the service checks.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._sent = False
        self.max_admissions: int | None = None
        """Most sequences to admit."""
        self.token_budget: int | None = None
        """Most tokens to compute in first chunks, over all admitted sequences."""
        self.observed: list[tuple[int, U32Array]] = []
        self.committed: list[tuple[U64Array, U32Array]] = []
        self.rolled_back: list[tuple[U64Array, U32Array]] = []
        self.forked: list[tuple[int, list[int], int | None]] = []
        self.finished: list[tuple[U64Array, U32Array]] = []
        self.extended: list[tuple[U64Array, U32Array]] = []
        self.advanced: list[tuple[U64Array, U32Array, U32Array, U32Array]] = []
        self.new: list[step_pb2.NewSequence] = []
        self.order: list[int] = []
        self.chunks: list[int] = []

    def observe(self, sequence_id: int, tokens: Integers) -> None:
        """Token ids that became known, behind those known before."""
        self.observed.append((sequence_id, _u32("tokens", tokens)))

    def commit(self, sequence_ids: Integers, num_tokens: Integers) -> None:
        """KV is written on the device (completed, not launched) up to `num_tokens`."""
        self.committed.append(_pair("commit", sequence_ids, num_tokens))

    def rollback(self, sequence_ids: Integers, num_tokens: Integers) -> None:
        """Cut sequences to their accepted length."""
        self.rolled_back.append(_pair("rollback", sequence_ids, num_tokens))

    def fork(self, parent_id: int, count: int = 1, num_tokens: int | None = None) -> list[int]:
        """New sequences that share the parent's committed blocks; returns their ids."""
        children: list[int] = []
        try:
            for _ in range(count):
                children.append(self._rows.new_id())  # noqa: PERF401 - what was taken is given back on an error
        except LimitExceededError:
            for child in children:
                self._rows.give_back(child)
            raise
        self.forked.append((parent_id, children, num_tokens))
        return children

    def finish(self, sequence_ids: Integers, reason: FinishReason = FinishReason.STOP) -> None:
        """End sequences, in any state. What they published stays."""
        ids = _u64("sequence_ids", sequence_ids)
        self.finished.append((ids, np.full(len(ids), int(reason), np.uint32)))

    def extend(self, sequence_ids: Integers, num_slots: Integers) -> None:
        """Reserve slots of running sequences, before their tokens are known."""
        self.extended.append(_pair("extend", sequence_ids, num_slots))

    def advance(self, sequence_ids: Integers, tokens: Integers, num_committed: Integers, num_slots: Integers) -> None:
        """Observe one token, commit and extend for each sequence: steady decode."""
        ids, committed = _pair("advance", sequence_ids, num_committed)
        columns = (_u32("tokens", tokens), committed, _u32("num_slots", num_slots))
        for name, column in zip(("tokens", "num_committed", "num_slots"), columns, strict=True):
            _parallel(f"advance.{name}", column, ids)
        self.advanced.append((ids, *columns))

    def admit(
        self,
        tokens: Integers,
        *,
        namespace_id: int = 0,
        read_cache: bool = True,
        write_cache: bool = True,
        max_hit_tokens: int | None = None,
        max_chunk_tokens: int | None = None,
        priority: int = 0,
        arrival_rank: int | None = None,
        name: str = "",
        content: Iterable[types_pb2.ContentSpan] = (),
        adapters: Iterable[types_pb2.AdapterSpan] = (),
    ) -> int:
        """A new sequence with its prompt; returns its id. It is known from then on, admitted or waiting.

        `max_chunk_tokens` limits the first chunk net of hits, `max_hit_tokens` the hit; a lower `priority` is more
        important and yields later. `name` is for logs.
        """
        message = step_pb2.NewSequence(
            tokens=_packed("tokens", tokens),
            namespace_id=namespace_id,
            content=content,
            adapters=adapters,
            priority=priority,
            request_name=name,
        )
        if not message.tokens:
            raise InvalidArgumentError.of("tokens", "a sequence has at least one token")
        if not read_cache:
            message.read_cache = False
        if not write_cache:
            message.write_cache = False
        if max_hit_tokens is not None:
            message.max_hit_tokens = max_hit_tokens
        if arrival_rank is not None:
            message.arrival_rank = arrival_rank
        _check_chunk(max_chunk_tokens)
        message.sequence_id = self._rows.new_id()
        self.new.append(message)
        self._ask(message.sequence_id, max_chunk_tokens)
        return message.sequence_id

    def readmit(
        self, sequence_ids: int | Sequence[int] | npt.NDArray[np.integer], max_chunk_tokens: int | None = None
    ) -> None:
        """Ask again for sequences that wait or were preempted, in this order among all admissions of the step."""
        _check_chunk(max_chunk_tokens)
        for sequence_id in _u64("sequence_ids", sequence_ids).tolist():
            self._ask(sequence_id, max_chunk_tokens)

    def take(self) -> None:
        """It is being sent. Raises `PreconditionError` when it was sent or discarded already."""
        if self._sent:
            raise PreconditionError("the step was sent or discarded already; make a new draft")
        self._sent = True

    def write(self, message: step_pb2.Step) -> None:
        """Encode into `message`, in place: nested messages in constructors are copied."""
        if self.observed:
            message.observe.sequence_ids = np.array([each for each, _ in self.observed], "<u8").tobytes()
            message.observe.counts = pack_u32([len(tokens) for _, tokens in self.observed])
            message.observe.tokens = b"".join(tokens.tobytes() for _, tokens in self.observed)
        if self.committed:
            message.commit.sequence_ids, message.commit.num_tokens = _joined(self.committed)
        if self.rolled_back:
            message.rollback.sequence_ids, message.rollback.num_tokens = _joined(self.rolled_back)
        for parent_id, children, num_tokens in self.forked:
            fork = message.forks.add(parent_sequence_id=parent_id)
            fork.child_sequence_ids = np.array(children, "<u8").tobytes()
            if num_tokens is not None:
                fork.num_tokens = num_tokens
        if self.finished:
            message.finish.sequence_ids, message.finish.reasons = _joined(self.finished)
        if self.extended:
            message.extend.sequence_ids, message.extend.num_slots = _joined(self.extended)
        if self.advanced:
            advance = message.advance
            columns = [b"".join(part[index].tobytes() for part in self.advanced) for index in range(4)]
            advance.sequence_ids, advance.tokens, advance.num_committed, advance.num_slots = columns
        if self.order:
            self._write_admit(message.admit)

    def discard(self) -> None:
        """Not to be sent after all."""
        if not self._sent:
            self._sent = True
            self.give_rows_back()

    def give_rows_back(self) -> None:
        """The service has not taken the step: the ids of its new sequences were never used."""
        for message in self.new:
            self._rows.give_back(message.sequence_id)
        for _, children, _ in self.forked:
            for child in children:
                self._rows.give_back(child)

    def _write_admit(self, admit: step_pb2.Admit) -> None:
        admit.sequences.extend(self.new)
        admit.order = np.array(self.order, "<u8").tobytes()
        if any(self.chunks):
            admit.max_chunk_tokens = pack_u32(self.chunks)
        if self.max_admissions is not None:
            admit.max_sequences = self.max_admissions
        if self.token_budget is not None:
            admit.token_budget = self.token_budget

    def _ask(self, sequence_id: int, max_chunk_tokens: int | None) -> None:
        self.order.append(sequence_id)
        self.chunks.append(max_chunk_tokens or 0)


def _pair(name: str, sequence_ids: Integers, lengths: Integers) -> tuple[U64Array, U32Array]:
    ids, values = _u64(f"{name}.sequence_ids", sequence_ids), _u32(f"{name}.lengths", lengths)
    _parallel(f"{name}.lengths", values, ids)
    return ids, values


def _check_chunk(max_chunk_tokens: int | None) -> None:
    if max_chunk_tokens is not None and max_chunk_tokens < 1:
        raise InvalidArgumentError.of("max_chunk_tokens", f"must be at least 1, got {max_chunk_tokens}")


def _parallel(field: str, values: U32Array, ids: U64Array) -> None:
    if len(values) != len(ids):
        raise InvalidArgumentError.of(field, f"has {len(values)} elements for {len(ids)} sequences")


def _joined(parts: list[tuple[U64Array, U32Array]]) -> tuple[bytes, bytes]:
    if len(parts) == 1:
        return parts[0][0].tobytes(), parts[0][1].tobytes()
    return b"".join(ids.tobytes() for ids, _ in parts), b"".join(values.tobytes() for _, values in parts)


def _packed(field: str, values: Integers) -> bytes:
    return values if isinstance(values, bytes) else _u32(field, values).tobytes()


def _u32(field: str, values: Integers) -> U32Array:
    return _integers(field, values, np.dtype("<u4"))


def _u64(field: str, values: Integers) -> U64Array:
    return _integers(field, values, np.dtype("<u8"))


def _integers(field: str, values: Integers, dtype: np.dtype[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """A private copy: what the caller does with its array later must not change the step."""
    array = np.atleast_1d(np.asarray(values))
    if array.dtype == dtype and array.ndim == 1:
        return array.copy()
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgumentError.of(field, f"must be integers, got {array.dtype}")
    if array.ndim != 1:
        raise InvalidArgumentError.of(field, f"must have one dimension, got shape {array.shape}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > np.iinfo(dtype).max):
        raise InvalidArgumentError.of(field, f"values from {array.min()} to {array.max()} do not fit {dtype}")
    return array.astype(dtype)
