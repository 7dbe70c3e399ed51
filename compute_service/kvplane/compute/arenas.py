"""Arenas: memory that a remote session on this host shares with the service for its tensors."""

from dataclasses import dataclass

from kvplane.compute import memory
from kvplane.compute.memory import SharedMemory
from kvplane.wire.errors import InvalidArgumentError, LimitExceededError

SLICE_ALIGNMENT = 64
"""Bytes that every slice's offset is a multiple of."""


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """One arena of one session."""

    arena_id: int
    session_id: int
    shared: SharedMemory


class Arenas:
    """All arenas of the service, within one budget. Changed on the event loop alone."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._arenas: dict[int, Arena] = {}
        self._next_id = 1
        self.closed = 0
        """Counts arenas that were given up: what was remembered of their places may not hold any more."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.shared.num_bytes for arena in self._arenas.values())

    def create(self, session_id: int, num_bytes: int) -> Arena:
        """Raises `InvalidArgumentError` for an empty arena, `LimitExceededError` when the budget does not have it."""
        if num_bytes == 0:
            raise InvalidArgumentError.of("arena_bytes", "must be at least 1")
        free = self._budget_bytes - self.used_bytes
        if num_bytes > free:
            raise LimitExceededError(
                f"an arena of {num_bytes} bytes does not fit, {free} of {self._budget_bytes} are left",
                metadata={"limit": "arena_bytes", "value": str(self._budget_bytes)},
            )
        arena = Arena(self._next_id, session_id, memory.create_arena(f"kvplane-arena-{self._next_id}", num_bytes))
        self._arenas[arena.arena_id] = arena
        self._next_id += 1
        return arena

    def get(self, arena_id: int, session_id: int) -> Arena:
        """A session's own arena. Raises `InvalidArgumentError`."""
        arena = self._arenas.get(arena_id)
        if arena is None or arena.session_id != session_id:
            raise InvalidArgumentError.of("tensors.arena.arena_id", f"{arena_id} is no arena of session {session_id}")
        return arena

    def close(self, arena_id: int) -> None:
        """Give an arena up; work that runs on it keeps its mapping until it ends."""
        arena = self._arenas.pop(arena_id, None)
        if arena is not None:
            self.closed += 1
            arena.shared.close()

    def close_session(self, session_id: int) -> None:
        """Give all arenas of a session up."""
        for arena in [each for each in self._arenas.values() if each.session_id == session_id]:
            self.close(arena.arena_id)
