"""The CUDA backend without a GPU: Triton's kernels interpreted, those in CUDA C compiled by the host's C compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(900)  # a file full of tests
def test_cuda_kernels_pass_the_same_tests_on_host_memory() -> None:
    """In a process of its own: Triton decides whether to interpret when it is imported."""
    files = ("cuda_checks.py", "test_blocks.py", "test_write.py", "test_huge_pools.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in files)]
    # One interpreted program per row: not thousands of rows; and float16 (dtype2) is written as bfloat16 is.
    command += ["-k", "not long_write and not dtype2"]
    environment = {**os.environ, "KVPLANE_EMULATE_CUDA": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1], check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 80, done.stdout
    assert "skipped" not in done.stdout
