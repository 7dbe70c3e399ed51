"""Services for tests: over gRPC with a real shard, and the twin in process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvplane.cache.service.config import CacheConfig
from kvplane.cache.twin import InProcessCacheControl
from kvplane.wire.interface import CacheControl
from service_rig import RunningService
from tensorless_shard import TensorlessShard, full_attention, model_message


@dataclass
class Rig:
    """A pool `default` behind `CacheControl`."""

    control: CacheControl
    check_integrity: Callable[[], None]
    row: Callable[[int], tuple[bytes, int] | None]
    """Digest and generation in a block's directory row."""
    pass_time: Callable[[float], None] | None = None
    """In process only: time stands still otherwise."""


MakeRig = Callable[..., Rig]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., tuple[RunningService, list[TensorlessShard]]]]:
    """Makes running services with shards; all are stopped, and their invariants proved, at the end."""
    services: list[RunningService] = []
    shards: list[TensorlessShard] = []

    def make(
        num_blocks: int = 64, num_shards: int = 1, **settings: Any
    ) -> tuple[RunningService, list[TensorlessShard]]:
        settings.setdefault("watermark", 0.0)
        folder = tmp_path / str(len(services))
        folder.mkdir()
        running = RunningService(folder, **settings)
        services.append(running)
        mine = [
            TensorlessShard(running.address, rank=rank, world_size=num_shards, num_blocks=num_blocks).start()
            for rank in range(num_shards)
        ]
        shards.extend(mine)
        if mine:
            running.wait_ready()
        return running, mine

    yield make
    for running in services:
        running.check_integrity()
    for shard in shards:
        shard.stop()
    for running in services:
        running.stop()


@pytest.fixture(params=["in process", "over gRPC"])
def rig(request: pytest.FixtureRequest, service: Callable[..., Any]) -> MakeRig:
    """Makes a rig of either kind: one suite runs on both."""

    def make(num_blocks: int = 64, **settings: Any) -> Rig:
        settings.setdefault("watermark", 0.0)
        if request.param == "in process":
            twin = InProcessCacheControl(CacheConfig(metrics_address="", seal_interval_seconds=0, **settings))
            twin.add_shard("default", model_message(), [full_attention()], num_blocks)

            def check() -> None:
                core = twin.plane.pools["default"].core
                assert core is not None
                core.check_integrity()

            return Rig(twin, check, lambda _: None, twin.advance)
        running, (shard,) = service(num_blocks, **settings)

        def row(block: int) -> tuple[bytes, int]:
            assert shard.view is not None
            found = shard.view.blocks[block]
            assert block in shard.sealed_blocks()
            return found["digest"].tobytes(), int(found["generation"])

        return Rig(running.control(), running.check_integrity, row)

    return make
