"""One control plane and one shard on Unix sockets, for every test module of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from compute_control import ControlPlane
from compute_engine import running, settings
from compute_harness import Setup


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("kv")
    control = ControlPlane().start(f"unix:{folder / 'cache.sock'}")
    values = settings(folder)
    with running(values) as server:
        control.wait()
        control.create_pool(64)
        yield Setup(control, server, server.addresses[0], folder)
    control.stop()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Setup]:
    """A control plane and a shard of this test alone."""
    control = ControlPlane().start(f"unix:{tmp_path / 'cache.sock'}")
    with running(settings(tmp_path)) as server:
        control.wait()
        control.create_pool(64)
        setup = Setup(control, server, server.addresses[0], tmp_path)
        yield setup
        setup.close_engines()
    control.stop()


@pytest.fixture(autouse=True)
def _close_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "setup" in request.fixturenames:
        request.getfixturevalue("setup").close_engines()
