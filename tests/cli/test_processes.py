"""Services as child processes: what a pair starts is gone when the pair is, whatever ended it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli_pair
from cli_pair import SMALL
from cli_rig import MARK, marked
from kvplane.cli.child import Child
from kvplane.cli.interrupts import Interrupts
from kvplane.cli.processes import running_pair
from kvplane.v1 import types_pb2
from kvplane.wire.errors import UnavailableError
from service_rig import wait_until


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory, which must be empty at the end."""
    folder = Path("/dev/shm") / f"kvplane-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    yield folder
    folder.rmdir()


@pytest.mark.parametrize(
    ("number", "when", "status"),
    [
        (signal.SIGINT, 0.0, -signal.SIGINT),
        (signal.SIGTERM, 0.02, 128 + signal.SIGTERM),
        (signal.SIGINT, 0.3, -signal.SIGINT),
        (signal.SIGHUP, 0.8, 128 + signal.SIGHUP),
        (signal.SIGKILL, 0.5, -signal.SIGKILL),
        (signal.SIGKILL, "ready", -signal.SIGKILL),
    ],
)
def test_nothing_stays(tmp_path: Path, memory: Path, number: int, when: float | str, status: int) -> None:
    """Interrupted at some moment of the start or while running: no process, no memory, no socket stays."""
    mark = f"{number}-{when}-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, cli_pair.__file__, str(memory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "starting the services\n"
        if when == "ready":
            while not output.readline().startswith("ready"):
                assert process.poll() is None
            assert len(marked(mark)) == 4
            assert list(memory.glob("*/default-0/directory"))
        else:
            time.sleep(float(when))
        process.send_signal(number)
        assert process.wait(20) == status
    wait_until(lambda: not marked(mark), "all processes are gone", 5)
    assert not list(memory.iterdir())
    assert not list(tmp_path.iterdir())


def test_a_pair_survives_its_services(memory: Path) -> None:
    """READY after the cache service was killed and after the compute service was; a stopped child is found out."""
    words: list[str] = []
    with running_pair(SMALL, memory_folder=memory / "kept", on_progress=words.append) as pair:
        first = pair.pool()
        assert first.state == types_pb2.POOL_STATE_READY
        assert first.num_blocks == 64
        old = pair.cache
        pair.restart_cache(kill=True)
        assert old.status == -signal.SIGKILL
        assert pair.pool().incarnation > first.incarnation
        boot = pair.pool().shards[0].boot_id
        pair.restart_compute(0, kill=True)
        assert pair.pool().shards[0].boot_id != boot
        other = pair.spawn("calculator", "timeit", ["-n", "1", "-r", "1", "pass"], pipes=True)
        assert other.stdout.readline().startswith("1 loop")
        pair.computes[0].kill()
        with pytest.raises(UnavailableError, match="compute-0 ended with status -9"):
            pair.wait_ready(20)
    assert not any(child.alive for child in pair.children)
    assert not pair.runtime_folder.exists()
    assert words[0] == "starting the services"
    assert words[-2:] == ["stopping", ""]
    assert (memory / "kept" / "default-0" / "directory").exists()
    for path in sorted((memory / "kept").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (memory / "kept").rmdir()


def test_a_service_that_cannot_start_is_quoted(memory: Path) -> None:
    """The error holds the service's own words, and nothing stays."""
    flags = [*SMALL, "--num-layers", "0"]
    with (
        pytest.raises(
            UnavailableError, match=r"compute-0 ended with status 2: num_layers: .*greater than or equal to 1"
        ),
        running_pair(flags),
    ):
        pass
    assert not list(memory.iterdir())


def test_a_child_that_does_not_listen_is_killed() -> None:
    """SIGTERM first, SIGKILL after the grace; what it wrote is kept, the newest lines only."""
    deafen = "import signal; signal.signal(15, signal.SIG_IGN)"
    code = f"{deafen}; [print(i) for i in range(1000)]; print('set'); signal.pause()"
    deaf = Child("deaf", "timeit", ["-n", "1", "-r", "1", f"exec({code!r})"])
    wait_until(lambda: "set" in deaf.lines, "it ignores SIGTERM")
    assert len(deaf.lines) == 500
    assert deaf.stop(0.2) == -signal.SIGKILL


def test_a_signal_waits_for_the_shield() -> None:
    """Inside a shield nothing raises; the first one after it does; later ones are counted."""
    steps = []
    interrupts = Interrupts()

    def interrupted() -> None:
        with interrupts:
            try:
                with interrupts.shield():
                    os.kill(os.getpid(), signal.SIGINT)
                    steps.append("whole")
                steps.append("never")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps == ["whole", "cleaned up"]
    assert interrupts.count == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
