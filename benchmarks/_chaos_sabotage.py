"""Breaks each promise once and on purpose: a chaos run whose checks cannot fail would prove nothing."""

import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
from _chaos_world import TTL_SECONDS, World

from kvplane.client import Session
from kvplane.wire import directory
from kvplane.wire.errors import KvplaneError


class Sabotage:
    """Does nothing unless it is wanted."""

    def __init__(self, world: World) -> None:
        self.wanted = False
        self._world = world
        self._calms = 0
        self._stranger: Session | None = None

    def lose_blocks(self) -> None:
        """While the cache service is down: spoil what a shard says of its blocks."""
        if self.wanted:
            for path in self._world.memory.glob("*-0/directory"):
                # The rows of blocks alone: what is before them says who is waited for.
                header = np.frombuffer(path.read_bytes()[: directory.HEADER_BYTES], directory.HEADER)[0]
                self._scribble(path, int(header["rows_offset"]))

    def in_calm(self) -> None:
        """In the first calm: foreign bytes in a shard's blocks, a crash, blocks that no engine knows of. In the second
        one an engine that hangs."""
        if not self.wanted:
            return
        self._calms += 1
        engines = list(self._world.engines.values())
        if self._calms == 1:
            for path in self._world.memory.glob("*-0/blocks-*"):
                self._scribble(path, 0)
            engines[0].signal(signal.SIGKILL)
            self._stranger = Session.open(address=self._world.address, mode="remote", ttl_seconds=TTL_SECONDS)
            draft = self._stranger.draft()
            draft.admit(range(100, 140))
            self._stranger.run(draft)
        elif self._calms == 2:
            engines[1].signal(signal.SIGSTOP)

    @staticmethod
    def _scribble(path: Path, first: int) -> None:
        """Overwrite a file from `first` on."""
        with path.open("r+b") as file:
            file.seek(first)
            file.write(b"\x3f" * (path.stat().st_size - first))

    def close(self) -> None:
        """Let go of what was taken."""
        if self._stranger is not None:
            with suppress(KvplaneError):
                self._stranger.close()
