"""The demo taken away in the middle: nothing of it stays."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_rig import MARK, marked
from service_rig import wait_until

SHARED = Path("/dev/shm")
MOMENTS = os.environ.get("KVPLANE_DEMO_MOMENTS")
"""Seconds after which the demo is interrupted, with commas; default: two random ones in its first third."""


def moments() -> list[float]:
    if MOMENTS:
        return [float(each) for each in MOMENTS.split(",")]
    return [round(random.uniform(0.5, 16.0), 1) for _ in range(2)]


@pytest.mark.slow
def test_interrupted_it_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C at random moments: no process, no shared memory, no socket stays, and the status says interrupted."""
    for index, moment in enumerate(moments()):
        folder = tmp_path / str(index)
        folder.mkdir()
        before = set(SHARED.glob("kvplane-*"))
        mark = f"demo-{os.getpid()}-{index}"
        process = subprocess.Popen(
            [sys.executable, "-m", "kvplane.cli", "demo"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark, "TMPDIR": str(folder)},
        )
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        told = f"interrupted after {moment} s; it said:\n{said.decode()}"
        assert process.returncode in (130, -signal.SIGINT), told
        wait_until(lambda mark=mark: not marked(mark), f"all processes are gone, {told}", 5)  # type: ignore[misc]
        assert set(SHARED.glob("kvplane-*")) <= before, told
        assert not list(folder.glob("kvplane-*")), told
