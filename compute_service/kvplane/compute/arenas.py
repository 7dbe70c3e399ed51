"""Arenas: memory that a remote session on this host shares with the service for its tensors."""

import asyncio
from dataclasses import dataclass

from kvplane.compute import memory
from kvplane.compute.memory import SharedMemory
from kvplane.wire.errors import InvalidArgumentError, LimitExceededError

SLICE_ALIGNMENT = 64
"""Bytes that every slice's offset is a multiple of."""

SESSION_ARENAS = 8
"""Arenas that one session may have."""


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
        self._reserved: list[tuple[int, int]] = []
        """Sessions and bytes of arenas that are being made."""
        self._next_id = 1
        self.closed = 0
        """Counts arenas that were given up: what was remembered of their places may not hold any more."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.shared.num_bytes for arena in self._arenas.values())

    async def create(self, session_id: int, num_bytes: int) -> Arena:
        """Raises `InvalidArgumentError` for an empty arena, `LimitExceededError` when the budget does not have it or
        the session has `SESSION_ARENAS`."""
        if num_bytes == 0:
            raise InvalidArgumentError.of("arena_bytes", "must be at least 1")
        own = sum(arena.session_id == session_id for arena in self._arenas.values())
        if own + sum(each == session_id for each, _ in self._reserved) >= SESSION_ARENAS:
            raise LimitExceededError(
                f"session {session_id} has {SESSION_ARENAS} arenas",
                metadata={"limit": "session_arenas", "value": str(SESSION_ARENAS)},
            )
        free = self._budget_bytes - self.used_bytes - sum(size for _, size in self._reserved)
        if num_bytes > free:
            raise LimitExceededError(
                f"an arena of {num_bytes} bytes does not fit, {free} of {self._budget_bytes} are left",
                metadata={"limit": "arena_bytes", "value": str(self._budget_bytes)},
            )
        arena_id, reserved = self._next_id, (session_id, num_bytes)
        self._next_id += 1
        self._reserved.append(reserved)
        try:
            # Zeroing a gigabyte takes a good part of a second, in which heartbeats and streams have to go on.
            shared = await asyncio.to_thread(memory.create_arena, f"kvplane-arena-{arena_id}", num_bytes)
        finally:
            self._reserved.remove(reserved)
        arena = self._arenas[arena_id] = Arena(arena_id, session_id, shared)
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
