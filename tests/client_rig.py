"""A running cache service with a shard without tensors, and the ways to it that the SDK has."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvplane.client import AsyncSession, Session, StepDraft, StepResult
from kvplane.client.state import SessionState
from recovery.conftest import World
from service_rig import RunningService
from tensorless_shard import TensorlessShard

NUM_BLOCKS = 64
PROMPT = np.arange(40, dtype=np.uint32)


@dataclass
class Running:
    """One service with one shard."""

    service: RunningService
    shard: TensorlessShard

    @property
    def address(self) -> str:
        return self.service.address

    @property
    def core(self) -> Any:
        return self.service.server.plane.pools["default"].core


class LoopThread:
    """An event loop for asyncio sessions."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingAsyncSession:
    """An `AsyncSession` with the face of a `Session`: one suite runs on both."""

    def __init__(self, loop: LoopThread, session: AsyncSession) -> None:
        self._loop = loop
        self._session = session

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        if not asyncio.iscoroutinefunction(value):
            return value
        return lambda *args, **kwargs: self._loop.run(value(*args, **kwargs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what the type checker has to know
    state: SessionState
    close: Callable[[], None]
    draft: Callable[[], StepDraft]
    run: Callable[..., StepResult]


AnySession = Session | BlockingAsyncSession
OpenSession = Callable[..., AnySession]


def core_of(world: World) -> Any:
    """The core that decides now."""
    return world.service.server.plane.pools["default"].core


def launch(session: Any, world: World) -> None:
    """What a shard knows once an engine launched on its tables: stamps, and a remote session's grants."""
    table = session.sequences
    for shard in world.shards:
        shard.granted = {key: held for key, held in shard.granted.items() if key[0] != session.session_id}
        for row in table.rows_in_use.tolist():
            held = slice(0, int(table.num_blocks[row]))
            blocks, generations = table.blocks[row, held].astype(np.int64), table.generations[row, held]
            shard.stamp(blocks, np.maximum(shard.stamps[blocks], generations))
            if session.state.mode == "remote":
                named = list(zip(blocks.tolist(), generations.tolist(), strict=True))
                shard.granted[session.session_id, int(table.ids[row])] = named


def admit(session: Any, tokens: Any, **options: Any) -> tuple[int, Any]:
    """Admit one prompt in a step of its own."""
    draft = session.draft()
    sequence_id = draft.admit(tokens, **options)
    return sequence_id, session.run(draft)


def write_all(session: Any, sequence_id: int, length: int) -> Any:
    """Commit a prompt as if its KV were written."""
    draft = session.draft()
    draft.commit(sequence_id, length)
    return session.run(draft)
