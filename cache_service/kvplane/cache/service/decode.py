"""Steps from the wire into the core's values. Errors name the field as the proto does."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvplane.cache.core import Admit, Advance, Chain, Finish, Fork, Lengths, Observe, Step, TransferAck
from kvplane.cache.service.identities import check_name
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.digests import CONTENT_KINDS, ExtraKey, ExtraKeyKind, adapter_content
from kvplane.wire.errors import FieldViolation, InvalidArgumentError
from kvplane.wire.features import refuse
from kvplane.wire.limits import SALT_BYTES, SPAN_BLOCKS, SPANS, STEP_SEQUENCES
from kvplane.wire.packed import U64Array, unpack_u32, unpack_u64


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a step's meaning depends on besides the step."""

    block_tokens: int
    default_namespace_id: int = 0
    """The core's id of the namespace of sequences that name none."""
    completed_step: int = 0
    """Minimum over the session's ranks."""
    drained: tuple[int, ...] = ()
    """Sequences of the revocations that the step acknowledges."""
    chains: Mapping[int, Chain] = field(default_factory=dict)
    """Digests hashed ahead, by sequence id."""


_CORE_FIELDS = (
    ("transfers[", "acks["),
    ("drained[", "acknowledged_revocations["),
    ("admit[", "admit.order["),
    (".parent_id", ".parent_sequence_id"),
    (".child_ids[", ".child_sequence_ids["),
)
"""What the core calls otherwise than the wire."""


def decode_advance(message: step_pb2.Step, completed_step: int) -> Step:
    """A step of steady decode: nothing but `advance`, if that. Raises `InvalidArgumentError`."""
    return Step(
        step_id=message.step_id,
        last_seen_step=message.last_seen_step,
        completed_step=completed_step,
        advance=_advance(message.advance) if message.HasField("advance") else None,
    )


def decode_step(message: step_pb2.Step, around: Surroundings) -> Step:
    """Any step. Raises `InvalidArgumentError`, `UnsupportedFeatureError`."""
    admits, max_sequences, token_budget = _admit(message, around)
    return Step(
        step_id=message.step_id,
        last_seen_step=message.last_seen_step,
        completed_step=around.completed_step,
        transfers=tuple(_ack(index, ack) for index, ack in enumerate(message.acks)),
        drained=around.drained,
        observe=_observe(message.observe) if message.HasField("observe") else None,
        commit=_lengths(message.commit, "commit") if message.HasField("commit") else None,
        rollback=_rollback(message.rollback) if message.HasField("rollback") else None,
        forks=tuple(_fork(index, fork) for index, fork in enumerate(message.forks)),
        finish=_finish(message.finish) if message.HasField("finish") else None,
        extend=_extend(message.extend) if message.HasField("extend") else None,
        advance=_advance(message.advance) if message.HasField("advance") else None,
        admit=admits,
        max_admissions=max_sequences,
        max_admitted_tokens=token_budget,
    )


def wire_fields(error: InvalidArgumentError) -> InvalidArgumentError:
    """The core's error with its fields named as on the wire."""
    violations, message = [], error.message
    for violation in error.violations:
        field = violation.field
        for core, wire in _CORE_FIELDS:
            field = field.replace(core, wire)
        message = message.replace(violation.field, field)
        violations.append(FieldViolation(f"step.{field}", violation.description))
    return InvalidArgumentError(message, metadata=error.metadata, violations=tuple(violations))


def has_more(message: step_pb2.Step) -> bool:
    """Whether a step has operations besides `advance`."""
    has = message.HasField
    return bool(
        has("admit")
        or has("commit")
        or has("observe")
        or has("finish")
        or has("extend")
        or has("rollback")
        or message.forks
        or message.acks
    )


def _ids(field: str, packed: bytes) -> U64Array:
    ids = unpack_u64(field, packed)
    if len(ids) > STEP_SEQUENCES:
        raise InvalidArgumentError.of(field, f"names {len(ids)} sequences, at most {STEP_SEQUENCES} fit a step")
    return ids


def _advance(message: step_pb2.Advance) -> Advance:
    ids = _ids("step.advance.sequence_ids", message.sequence_ids)
    return Advance(
        ids,
        unpack_u32("step.advance.tokens", message.tokens, len(ids)),
        unpack_u32("step.advance.num_committed", message.num_committed, len(ids)),
        unpack_u32("step.advance.num_slots", message.num_slots, len(ids)),
    )


def _ack(index: int, message: types_pb2.Ack) -> TransferAck:
    failed = message.status.code != 0 or any(byte & 1 == 0 for byte in message.success_bitmap[:1])
    if len(message.success_bitmap) > 1:
        raise InvalidArgumentError.of(f"step.acks[{index}].success_bitmap", "has more bits than the copy has blocks")
    return TransferAck(message.op_id, not failed)


def _observe(message: step_pb2.Observe) -> Observe:
    ids = _ids("step.observe.sequence_ids", message.sequence_ids)
    return Observe(
        ids,
        unpack_u32("step.observe.counts", message.counts, len(ids)),
        unpack_u32("step.observe.tokens", message.tokens),
    )


def _lengths(message: step_pb2.Commit | step_pb2.Rollback, name: str) -> Lengths:
    if isinstance(message, step_pb2.Commit) and message.group_counts:
        raise refuse("group_counts", f"step.{name}.group_counts")
    ids = _ids(f"step.{name}.sequence_ids", message.sequence_ids)
    return Lengths(ids, unpack_u32(f"step.{name}.num_tokens", message.num_tokens, len(ids)))


def _rollback(message: step_pb2.Rollback) -> Lengths:
    if message.slot_moves:
        raise refuse("slot_moves", "step.rollback.slot_moves")
    return _lengths(message, "rollback")


def _extend(message: step_pb2.Extend) -> Lengths:
    if message.group_counts:
        raise refuse("group_counts", "step.extend.group_counts")
    ids = _ids("step.extend.sequence_ids", message.sequence_ids)
    return Lengths(ids, unpack_u32("step.extend.num_slots", message.num_slots, len(ids)))


def _fork(index: int, message: step_pb2.Fork) -> Fork:
    if message.HasField("num_tokens"):
        raise refuse("fork_at", f"step.forks[{index}].num_tokens")
    children = _ids(f"step.forks[{index}].child_sequence_ids", message.child_sequence_ids)
    return Fork(message.parent_sequence_id, tuple(children.tolist()))


def _finish(message: step_pb2.Finish) -> Finish:
    if message.retain:
        raise refuse("retain", "step.finish.retain")
    ids = _ids("step.finish.sequence_ids", message.sequence_ids)
    reasons = unpack_u32("step.finish.reasons", message.reasons, len(ids))
    bad = (reasons < step_pb2.FINISH_REASON_STOP) | (reasons > step_pb2.FINISH_REASON_ERROR)
    if np.count_nonzero(bad):
        at = int(bad.argmax())
        raise InvalidArgumentError.of(f"step.finish.reasons[{at}]", f"{int(reasons[at])} is no FinishReason")
    return Finish(ids, reasons)


def _admit(message: step_pb2.Step, around: Surroundings) -> tuple[tuple[Admit, ...], int | None, int | None]:
    if not message.HasField("admit"):
        return (), None, None
    admit = message.admit
    order = _ids("step.admit.order", admit.order)
    chunks = unpack_u32("step.admit.max_chunk_tokens", admit.max_chunk_tokens)
    if len(chunks) and len(chunks) != len(order):
        raise InvalidArgumentError.of("step.admit.max_chunk_tokens", f"has {len(chunks)} elements, not {len(order)}")
    new: dict[int, Admit] = {}
    for index, sequence in enumerate(admit.sequences):
        if sequence.sequence_id in new:
            raise InvalidArgumentError.of(f"step.admit.sequences[{index}].sequence_id", "is named twice")
        new[sequence.sequence_id] = decode_sequence(sequence, f"step.admit.sequences[{index}]", around)
    admits = []
    for index, sequence_id in enumerate(order.tolist()):
        limit = int(chunks[index]) if len(chunks) and chunks[index] else None
        known = new.pop(sequence_id, None)
        admit_one = known or Admit(sequence_id)
        admits.append(admit_one if limit is None else replace(admit_one, max_chunk_tokens=limit))
    if new:
        raise InvalidArgumentError.of("step.admit.order", f"does not name the new sequence {next(iter(new))}")
    return (
        tuple(admits),
        admit.max_sequences if admit.HasField("max_sequences") else None,
        admit.token_budget if admit.HasField("token_budget") else None,
    )


def decode_sequence(message: step_pb2.NewSequence, field: str, around: Surroundings) -> Admit:
    """A new sequence, whole: what is not built of it is refused, not ignored."""
    unpack_u32(f"{field}.tokens", message.tokens)
    if not message.tokens:
        raise InvalidArgumentError.of(f"{field}.tokens", "a sequence has at least one token")
    if message.purpose not in (step_pb2.PURPOSE_UNSPECIFIED, step_pb2.PURPOSE_GENERATE):
        raise refuse("purpose", f"{field}.purpose")
    for name in ("external_tokens", "adopt"):
        if message.HasField(name):
            raise refuse(name, f"{field}.{name}")
    check_name(message.request_name, f"{field}.request_name")
    if message.arrival_rank >= 1 << 63:
        raise InvalidArgumentError.of(f"{field}.arrival_rank", "must be below 2^63")
    if len(message.content) + len(message.adapters) > SPANS:
        raise InvalidArgumentError.of(f"{field}.content", f"has more than {SPANS} spans, adapters included")
    return Admit(
        sequence_id=message.sequence_id,
        tokens=message.tokens,
        namespace_id=namespace_of(message.namespace_id, around.default_namespace_id),
        read_cache=not message.HasField("read_cache") or message.read_cache,
        write_cache=not message.HasField("write_cache") or message.write_cache,
        max_hit_tokens=message.max_hit_tokens if message.HasField("max_hit_tokens") else None,
        chain=around.chains.get(message.sequence_id),
        extra_keys=extra_keys(message, around.block_tokens, field),
        priority=message.priority,
        arrival_rank=message.arrival_rank if message.HasField("arrival_rank") else None,
    )


def namespace_of(wire_id: int, default_namespace_id: int) -> int:
    """The core's id of a namespace: on the wire ids count from 1, and 0 is the session's own."""
    return wire_id - 1 if wire_id else default_namespace_id


def extra_keys(message: step_pb2.NewSequence, block_tokens: int, field: str) -> dict[int, tuple[ExtraKey, ...]]:
    """Extra keys by block: what spans of content and of adapters, in prompt coordinates, mean for each block."""
    keys: dict[int, list[ExtraKey]] = {}
    for index, span in enumerate(message.content):
        where = f"{field}.content[{index}]"
        if span.kind not in CONTENT_KINDS:
            raise InvalidArgumentError.of(f"{where}.kind", f"{span.kind:#x} is no kind of content")
        if not 1 <= len(span.content) <= SALT_BYTES:
            raise InvalidArgumentError.of(f"{where}.content", f"has {len(span.content)} bytes, allowed are 1..64")
        for block, offset in _overlaps(span, message, block_tokens, where):
            keys.setdefault(block, []).append(ExtraKey(span.kind, span.content, offset))
    for index, adapter in enumerate(message.adapters):
        where = f"{field}.adapters[{index}]"
        check_name(adapter.adapter_id, f"{where}.adapter_id")
        check_name(adapter.adapter_revision, f"{where}.adapter_revision")
        content = adapter_content(adapter.adapter_id, adapter.adapter_revision)
        for block, offset in _overlaps(adapter, message, block_tokens, where):
            keys.setdefault(block, []).append(ExtraKey(ExtraKeyKind.ADAPTER, content, offset))
    if sum(len(each) for each in keys.values()) > SPAN_BLOCKS:
        raise InvalidArgumentError.of(f"{field}.content", f"spans overlap more than {SPAN_BLOCKS} blocks in all")
    return {block: tuple(each) for block, each in keys.items()}


def _overlaps(
    span: types_pb2.ContentSpan | types_pb2.AdapterSpan, message: step_pb2.NewSequence, block_tokens: int, where: str
) -> Iterator[tuple[int, int]]:
    """(block, offset of the span's begin in it) for each block that a span overlaps."""
    num_tokens, end = len(message.tokens) // 4, span.first_token + span.num_tokens
    if not span.num_tokens or end > num_tokens:
        raise InvalidArgumentError.of(f"{where}.num_tokens", f"ends at {end} of {num_tokens} tokens")
    for block in range(span.first_token // block_tokens, -(-end // block_tokens)):
        yield block, span.first_token - block * block_tokens
