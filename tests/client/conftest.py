"""Fixtures of the SDK's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client_rig import NUM_BLOCKS, AnySession, BlockingAsyncSession, LoopThread, OpenSession, Running
from compute_access import Rig, rig
from kvplane.client import AsyncSession, Session
from recovery.conftest import World
from service_rig import RunningService
from tensorless_shard import TensorlessShard


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A service; its invariants are proved at the end. `@pytest.mark.parametrize("running", [blocks], indirect=True)`
    gives it another number of blocks."""
    service = RunningService(tmp_path, watermark=0.0)
    shard = TensorlessShard(service.address, num_blocks=getattr(request, "param", NUM_BLOCKS)).start()
    service.wait_ready()
    yield Running(service, shard)
    service.check_integrity()
    shard.stop()
    service.stop()


@pytest.fixture(params=["sync", "asyncio"])
def open_session(request: pytest.FixtureRequest) -> Iterator[OpenSession]:
    """Opens sessions of either kind; all are closed at the end."""
    loop = LoopThread() if request.param == "asyncio" else None
    sessions: list[AnySession] = []

    def make(**options: Any) -> AnySession:
        if loop is None:
            made: AnySession = Session.open(**options)
        else:
            made = BlockingAsyncSession(loop, loop.run(AsyncSession.open(**options)))
        sessions.append(made)
        return made

    yield make
    for session in sessions:
        session.close()
    if loop is not None:
        loop.stop()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A pool over two shards, for a whole module."""
    with rig(tmp_path_factory.mktemp("kv"), 2, change=lambda _: {"tensor_parallel": 2}) as made:
        yield made


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Rig]:
    """The same for one test."""
    with rig(tmp_path, 2, change=lambda _: {"tensor_parallel": 2}) as made:
        yield made


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes cache services that can be killed, with a shard; invariants are proved at the end."""
    made: list[World] = []

    def make(num_blocks: int = 64, **settings: Any) -> World:
        made.append(World(tmp_path, num_blocks, 1, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
