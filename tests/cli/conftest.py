"""The command in this process, and services for it to look at."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from compute_engine import running, settings
from kvplane.cli.__main__ import main
from kvplane.compute.server import ComputeServer
from service_rig import RunningService


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    def finding(self, check: str) -> str:
        """The line of `kvplane check` about this, and the hint below it."""
        lines = self.out.splitlines()
        (at,) = [index for index, line in enumerate(lines) if line[2:].startswith(f"{check}: ")]
        following = lines[at + 1 : at + 2]
        return lines[at] + ("\n" + following[0].strip() if following and following[0].startswith("    →") else "")


Kvplane = Callable[..., Ran]


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


@dataclass(frozen=True)
class Pair:
    """Both services in this process."""

    cache: RunningService
    compute: ComputeServer
    address: str
    folder: Path


MODEL: dict[str, Any] = {
    "weights_revision": "w1",
    "tokenizer_revision": "t1",
    "kv_dtype": "bfloat16",
    "block_tokens": 16,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A healthy pair for all tests of a module."""
    folder = tmp_path_factory.mktemp("pair")
    cache = RunningService(folder)
    with running(settings(folder, **MODEL)) as compute:
        cache.wait_ready()
        yield Pair(cache, compute, cache.address, folder)
    cache.stop()
