"""A cache service that is killed and started again on the same socket, with shards that outlive it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplane.v1 import types_pb2
from kvplane.wire.errors import KvplaneError
from service_rig import RunningService, wait_until
from tensorless_shard import TensorlessShard


class World:
    """One folder, one service at a time, shards."""

    def __init__(
        self, folder: Path, num_blocks: int, num_shards: int, group: types_pb2.GroupSpec | None = None, **settings: Any
    ) -> None:
        self._folder = folder
        self._settings = {
            "watermark": 0.0,
            "drain_seconds": 0.0,
            "metrics_address": "",
            "seal_interval_seconds": 0.0,
        } | settings
        self.service = RunningService(folder, **self._settings)
        self.shards = [
            TensorlessShard(
                self.service.address, rank=rank, world_size=num_shards, num_blocks=num_blocks, group=group
            ).start()
            for rank in range(num_shards)
        ]
        self.service.wait_ready()

    def die(self) -> None:
        """The service is gone; what it knew is lost."""
        self.service.check_integrity()
        self.service.stop()

    def start(self, wait: bool = False) -> None:
        """Another start of the service; the shards find it."""
        self.service = RunningService(self._folder, **self._settings)
        for shard in self.shards:
            wait_until(lambda shard=shard: self._dials(shard), "the shard is back")  # type: ignore[misc]
        if wait:
            self.service.wait_ready()

    def restart(self, wait: bool = False) -> None:
        """Die and start."""
        self.die()
        self.start(wait)

    @staticmethod
    def _dials(shard: TensorlessShard) -> bool:
        try:
            shard.start()
        except KvplaneError:
            return False
        return True

    def stats(self) -> types_pb2.PoolStats:
        """Counters of the pool."""
        return self.service.on_loop(lambda: self.service.server.plane.pools["default"].stats())

    def state(self) -> str:
        """State of the pool."""
        return types_pb2.PoolState.Name(self.service.server.plane.pools["default"].state).removeprefix("POOL_STATE_")

    def close(self) -> None:
        """Stop all."""
        self.service.check_integrity()
        for shard in self.shards:
            shard.stop()
        self.service.stop()


MakeWorld = Callable[..., World]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Makes worlds; invariants are proved at the end of each."""
    made: list[World] = []

    def make(num_blocks: int = 64, num_shards: int = 1, **settings: Any) -> World:
        made.append(World(tmp_path, num_blocks, num_shards, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
