"""The command in this process, and services for it to look at."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from cli_rig import MODEL, Kvplane, Pair, Ran
from compute_engine import running, settings
from kvplane.cli.__main__ import main
from service_rig import RunningService


@pytest.fixture
def kvplane(capfd: pytest.CaptureFixture[str]) -> Iterator[Kvplane]:
    """Runs `kvplane` with arguments. The services log from this process too: that is kept out of the output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Ran(int(ended.value.code or 0), out, err)

    yield run
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A healthy pair for all tests of a module."""
    folder = tmp_path_factory.mktemp("pair")
    cache = RunningService(folder)
    with running(settings(folder, **MODEL)) as compute:
        cache.wait_ready()
        yield Pair(cache, compute, cache.address, folder)
    cache.stop()
