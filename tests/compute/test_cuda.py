"""The compute service on CUDA without a GPU: on a device that is emulated in host memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(900)  # a file full of tests
def test_the_service_on_an_emulated_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "cuda_checks.py")]
    environment = {**os.environ, "KVPLANE_EMULATE_CUDA": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1], check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 8, done.stdout
