"""What an engine says that it holds after a restart of the control plane, and whether that can be at all."""

from dataclasses import dataclass, field

import numpy as np

from kvplane.cache.core.arrays import I64, NO_I64, NO_U64, U64, Bools
from kvplane.cache.core.requests import Admit
from kvplane.cache.core.sequences import ROW_MASK
from kvplane.cache.core.sessions import Session
from kvplane.cache.core.state import PoolState
from kvplane.wire.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Declared:
    """A sequence as its engine knows it."""

    admit: Admit
    """As it was introduced, with all tokens that are known by now."""
    num_prompt_tokens: int = 0
    num_committed: int = 0
    block_ids: I64 = field(default_factory=NO_I64.copy)
    """Its table; 0 for entries that have left the sliding window."""
    generations: U64 = field(default_factory=NO_U64.copy)
    runs: bool = True
    """It has a table, which may be empty."""
    preempted: bool = False
    """It ran before, and does not run now."""
    granted: Bools | None = None
    """Which entries every shard has in this sequence's granted table; None: the engine is trusted."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """All that a session holds."""

    sequences: tuple[Declared, ...]
    deferred: tuple[tuple[int, I64, U64], ...]
    """Released blocks that launched work may still touch: (step whose completion frees them, ids, generations)."""
    last_sent_step: int
    completed_step: int
    """Minimum over the session's ranks."""


def check(state: PoolState, session: Session, declaration: Declaration) -> None:
    """Raises `InvalidArgumentError` or `NotFoundError` for what no engine can hold; changes nothing."""
    last = declaration.last_sent_step
    if not 0 <= last < 1 << 62:
        raise InvalidArgumentError.of("declaration.last_sent_step", "must be below 2^62")
    if declaration.completed_step > last:
        raise InvalidArgumentError.of("declaration.completed_steps", f"are beyond the last step sent, {last}")
    taken: set[int] = set()
    for index, declared in enumerate(declaration.sequences):
        where, sequence_id = f"declaration.sequences[{index}]", declared.admit.sequence_id
        row = sequence_id & ROW_MASK
        if not 0 < sequence_id < 1 << 64 or row >= session.max_sequences:
            raise InvalidArgumentError.of(
                f"{where}.sequence.sequence_id", f"row {row} is not below {session.max_sequences}"
            )
        if row in taken or state.rows.ids[session.first_row + row]:
            raise InvalidArgumentError.of(f"{where}.sequence.sequence_id", f"row {row} belongs to another sequence")
        taken.add(row)
        _check_sequence(state, declared, where)
    for index, (step_id, ids, _) in enumerate(declaration.deferred):
        _check_ids(state, ids, f"declaration.deferred[{index}].blocks.block_ids", 1)
        if not 0 < step_id <= last:
            raise InvalidArgumentError.of(
                f"declaration.deferred[{index}].step_id", f"is {step_id}, must be between 1 and {last}"
            )


def _check_sequence(state: PoolState, declared: Declared, where: str) -> None:
    config, ids = state.config, declared.block_ids
    known = len(declared.admit.tokens) // 4
    state.namespaces.root(declared.admit.namespace_id, f"{where}.sequence.namespace_id")
    if known > config.max_sequence_tokens:
        raise InvalidArgumentError.of(f"{where}.sequence.tokens", f"are more than {config.max_sequence_tokens}")
    if declared.num_prompt_tokens > known:
        raise InvalidArgumentError.of(f"{where}.num_prompt_tokens", f"is beyond the {known} known tokens")
    if declared.num_committed > min(known, len(ids) * config.block_tokens):
        raise InvalidArgumentError.of(f"{where}.num_committed", "is beyond the known tokens or the table")
    if len(ids) and not declared.runs:
        raise InvalidArgumentError.of(f"{where}.table", "a sequence that does not run has none")
    if not len(ids):
        return
    path = f"{where}.table.block_ids"
    if len(ids) * config.block_tokens > config.max_sequence_tokens + config.block_tokens:
        raise InvalidArgumentError.of(path, "cover more than the longest sequence")
    _check_ids(state, ids, path, 0)
    real = ids[ids != 0]
    if not len(real) or not ids[-len(real) :].all() or (len(real) < len(ids) and state.rules.prefix_closed):
        raise InvalidArgumentError.of(path, "have the null block where no sliding window has passed")
    if len(np.unique(real)) < len(real):
        raise InvalidArgumentError.of(path, "name a block twice")


def _check_ids(state: PoolState, ids: I64, path: str, least: int) -> None:
    if len(ids) and not least <= int(ids.min()) <= int(ids.max()) < state.pool.num_blocks:
        raise InvalidArgumentError.of(path, f"must be between {least} and {state.pool.num_blocks - 1}")
