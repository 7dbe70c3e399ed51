"""A running cache service with a shard without tensors, and the ways to it that the SDK has."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

from kvplane.client import AsyncSession, Session, StepDraft, StepResult
from kvplane.client.state import SessionState
from service_rig import RunningService
from tensorless_shard import TensorlessShard

NUM_BLOCKS = 64


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
