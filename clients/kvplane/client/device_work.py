"""What a session's device work still touches: open plans, completed steps, copies, table changes, grants."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvplane.client.sequences import I64, U64
from kvplane.client.values import BlockCopy
from kvplane.v1 import step_pb2
from kvplane.wire.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What became named by the session's tables, and what they let go of, since the last time it was asked.

    Entries that came and went in between are left out: nothing was launched on them.
    """

    granted_ids: I64
    """Every new table entry, hits included, shape [n]; a block that two sequences name comes twice."""
    granted_generations: U64
    """Shape [n]."""
    released: list[tuple[int, I64]]
    """(step, block ids [m]): nothing launched touches them once that step has completed."""
    copies: list[BlockCopy]
    """To run, in order, before the first write."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """Blocks that were let go of, and may be touched by device work until `step_id` has completed."""

    step_id: int
    ids: I64
    generations: U64


@dataclass(slots=True)
class DeviceWork:
    """Says which steps have completed on the device (design I9), and keeps what a compute access must act on.

    With `automatic`, a step counts as completed when no plan is open that was made before or at it. Otherwise the
    engine says so with `complete`.

    What a step tells the service is less while more may be launched on the newest tables before its answer is read: a
    sequence that has to yield in that very step is named by them until then.
    """

    ranks: int = 1
    last_step: int = 0
    """Newest step whose result was applied."""
    automatic: bool = False
    keeps_changes: bool = False
    _completed: list[int] = field(default_factory=list)
    _told: int = 0
    """Newest step that the service was told has completed, with `automatic`."""
    _open: dict[int, int] = field(default_factory=dict)
    _tokens: int = 0
    _changes: list[tuple[I64, U64] | tuple[int, I64]] = field(default_factory=list)
    """In order: (ids, generations) granted, or (step, ids) released."""
    _deferred: deque[Deferred] = field(default_factory=deque)
    _to_copy: list[BlockCopy] = field(default_factory=list)
    _awaited: dict[int, BlockCopy] = field(default_factory=dict)
    _copied: dict[int, int] = field(default_factory=dict)
    """Newest result when each copy was launched, by operation."""
    _grants: list[step_pb2.Grant] = field(default_factory=list)
    _revocations: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._completed = [0] * self.ranks

    # Completion

    @property
    def completed_steps(self) -> list[int]:
        """Newest completed step of each rank."""
        if self.automatic and self.ranks == 1:
            self._completed[0] = max(self._completed[0], self._done())
        return self._completed

    @property
    def completed_step(self) -> int:
        """Newest step that has completed on every rank."""
        return min(self.completed_steps)

    def tell_completed(self, *, overlapped: bool) -> list[int]:
        """What a step that is sent now says of each rank; `overlapped` when plans may be made before its answer."""
        completed = self.completed_steps
        if not self.automatic or self.ranks > 1:
            return completed
        self._told = max(self._told, min(completed[0], self.last_step - overlapped))
        return [self._told]

    def declared_completed(self, last_sent_step: int) -> list[int]:
        """What a declaration says of each rank: what runs now counts as running, whatever was said before it began. And
        no more than the step behind it can say, which may be sent while more is launched on the tables that are left:
        they count as those of `last_sent_step`."""
        if not self.automatic or self.ranks > 1:
            return self.completed_steps
        return [max(0, min(self._done(), last_sent_step - 1))]

    def _done(self) -> int:
        # A copy: the engine's thread may close a plan while the heartbeat's looks.
        running = list(self._open.values())
        return min(running) - 1 if running else self.last_step

    @property
    def quiet_until_answered(self) -> bool:
        """Whether the service was told that nothing more is launched on the newest tables."""
        return self.automatic and self.ranks == 1 and self._told >= self.last_step

    def complete(self, step_id: int, rank: int = 0) -> None:
        """All that was launched on tables up to `step_id` has completed. Raises `InvalidArgumentError`."""
        if not 0 <= step_id <= self.last_step:
            raise InvalidArgumentError.of("step_id", f"{step_id} was not collected, the newest is {self.last_step}")
        if not 0 <= rank < self.ranks:
            raise InvalidArgumentError.of("rank", f"{rank} is not below {self.ranks}")
        self._completed[rank] = max(self._completed[rank], step_id)

    def plan_opened(self) -> int:
        """Something is about to be launched on the tables as they are; returns a token for `plan_closed`."""
        self._tokens += 1
        self._open[self._tokens] = self.last_step
        return self._tokens

    def plan_closed(self, token: int) -> None:
        """What the plan launched has completed."""
        self._open.pop(token, None)

    @property
    def open_plans(self) -> int:
        """Plans that were not closed."""
        return len(self._open)

    # Table changes

    def keep_changes(self) -> None:
        """Keep changes from now on, and forget older ones but for copies that are not known to be done."""
        self.keeps_changes = True
        self._changes.clear()
        self._to_copy = self.copies_pending()

    def granted(self, ids: I64, generations: U64) -> None:
        """Table entries were added."""
        if self.keeps_changes:
            self._changes.append((ids, generations))

    def released(self, ids: I64, generations: U64) -> None:
        """Table entries were let go of by the result that is being applied."""
        completed = self.completed_step
        while self._deferred and self._deferred[0].step_id <= completed:
            self._deferred.popleft()
        self._deferred.append(Deferred(self.last_step, ids, generations))
        if self.keeps_changes:
            self._changes.append((self.last_step, ids))

    def deferred_behind(self, completed_step: int) -> list[Deferred]:
        """Blocks that were let go of by later steps than this one."""
        return [each for each in self._deferred if each.step_id > completed_step]

    def take_changes(self) -> TableChanges:
        """What changed since the last call."""
        changes, self._changes = self._changes, []
        copies, self._to_copy = self._to_copy, []
        granted, released = _net(changes)
        ids = np.concatenate([each for each, _ in granted]) if granted else np.zeros(0, np.int64)
        generations = np.concatenate([each for _, each in granted]) if granted else np.zeros(0, np.uint64)
        return TableChanges(ids, generations, released, copies)

    # Copies and revocations, acknowledged once what they wait for has completed

    def copies_told(self, copies: tuple[BlockCopy, ...]) -> None:
        """Copies of a result."""
        self._to_copy.extend(copies)
        self._awaited.update({copy.op_id: copy for copy in copies})

    def copies_done(self, op_ids: list[int]) -> None:
        """Copies were launched, on the tables as they are now: what runs now has to complete before they are
        acknowledged, however old the step is that ordered them."""
        self._copied.update({op_id: self.last_step for op_id in op_ids if op_id in self._awaited})

    def copies_pending(self) -> list[BlockCopy]:
        """Copies that are not known to be done."""
        return [copy for op_id, copy in self._awaited.items() if op_id not in self._copied]

    def take_acks(self) -> list[int]:
        """Copies to acknowledge now."""
        completed = self.completed_step
        ready = [op_id for op_id, step in self._copied.items() if step <= completed]
        for op_id in ready:
            del self._copied[op_id], self._awaited[op_id]
        return sorted(ready)

    def revoked(self, revocation_id: int) -> None:
        """Sequences had to yield to another session: drained once all that was launched until now has completed."""
        self._revocations.append((revocation_id, self.last_step))

    def take_revocations(self) -> list[int]:
        """Revocations to acknowledge now."""
        completed = self.completed_step
        ready = [revocation for revocation, step in self._revocations if step <= completed]
        self._revocations = [each for each in self._revocations if each[1] > completed]
        return ready

    def forget_operations(self) -> None:
        """The service was restarted: its copies and revocations are void."""
        self._to_copy.clear()
        self._awaited.clear()
        self._copied.clear()
        self._revocations.clear()

    # Grants

    def keep_grant(self, grant: step_pb2.Grant, reset: bool) -> None:
        """A grant to pass on to every shard; one that resets replaces all before it."""
        if reset:
            self._grants.clear()
        self._grants.append(grant)

    def take_grants(self) -> list[step_pb2.Grant]:
        """Grants since the last call, in order."""
        grants, self._grants = self._grants, []
        return grants


def _net(
    changes: list[tuple[I64, U64] | tuple[int, I64]],
) -> tuple[list[tuple[I64, U64]], list[tuple[int, I64]]]:
    """Grants and releases without the entries that were granted first and released later."""
    granted: list[tuple[I64, U64]] = []
    released: list[tuple[int, I64]] = []
    for first, second in changes:
        if not isinstance(first, int):
            granted.append((first, second.astype(np.uint64, copy=False)))
            continue
        left = second.astype(np.int64, copy=False)
        for index, (ids, generations) in enumerate(granted):
            gone = np.zeros(len(ids), np.bool_)
            for place in np.flatnonzero(np.isin(ids, left)).tolist():
                found = np.flatnonzero(left == ids[place])
                if len(found):
                    left = np.delete(left, found[0])
                    gone[place] = True
            if gone.any():
                granted[index] = ids[~gone], generations[~gone]
        if len(left):
            released.append((first, left))
    return [each for each in granted if len(each[0])], released
