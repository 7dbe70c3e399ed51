"""The CPU backend as a program: threads, compilation, what it imports, where it keeps what it compiled."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kvplane.kernels import get_num_threads, set_num_threads
from kvplane.kernels.cpu import jit, threads
from kvplane.kernels.cpu.warm_up import warm_up


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_importing_the_package_does_not_import_the_compiler() -> None:
    loaded = run_python("import sys, kvplane.kernels; print({'numba', 'grpc', 'google', 'triton'} & set(sys.modules))")
    assert loaded.strip() == "set()"


def test_warm_up_says_what_it_did() -> None:
    warm_up([torch.float32])
    report = warm_up([torch.float32])
    assert (report.compiled, report.loaded) == (0, 0), "this process has them"
    assert report.seconds < 5
    assert report.cache_folder == jit.CACHE_FOLDER
    again = run_python(
        "import torch\n"
        "from kvplane.kernels.cpu.warm_up import warm_up\n"
        "report = warm_up([torch.float32])\n"
        "print(report.compiled, report.loaded)"
    )
    assert again.split() == ["0", "6"], "another process loads them"


def test_cache_folder_is_always_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert jit.cache_folder().parent == tmp_path / "user" / "kvplane"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert jit.cache_folder().parent == tmp_path / "numba" / "kvplane"
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    fallback = jit.cache_folder()
    assert fallback.is_dir()
    assert tmp_path not in fallback.parents
    fallback.rmdir()


def test_set_num_threads() -> None:
    before = get_num_threads()
    assert before >= 1
    try:
        set_num_threads(3)
        assert get_num_threads() == 3
        names: set[str] = set()
        barrier = threading.Barrier(3, timeout=20)

        def task() -> None:
            names.add(threading.current_thread().name)
            barrier.wait()

        threads.run_on_all(task, useful=8)
        assert len(names) == 3
        set_num_threads(1)
        threads.run_on_all(lambda: names.clear(), useful=8)
        assert not names
        with pytest.raises(ValueError, match="count"):
            set_num_threads(0)
    finally:
        set_num_threads(before)


def test_an_error_on_any_thread_reaches_the_caller() -> None:
    before = get_num_threads()
    caller = threading.current_thread()
    started = threading.Event()

    def task() -> None:
        if threading.current_thread() is caller:
            assert started.wait(20)
            return
        started.set()
        raise RuntimeError("from a helper")

    try:
        set_num_threads(2)
        with pytest.raises(RuntimeError, match="from a helper"):
            threads.run_on_all(task, useful=2)
    finally:
        set_num_threads(before)


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    code = """
import os, torch
from kvplane.kernels.cpu import threads
threads.set_num_threads(2)
threads.run_on_all(lambda: None, 2)
child = os.fork()
if child == 0:
    threads.run_on_all(lambda: None, 2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code).strip() == "7"


def test_other_instruction_sets() -> None:
    """Without AVX, native bfloat16 or native half precision the same source compiles and agrees."""
    code = """
import torch
from kernel_cases import Case, build
from kernel_oracle import assert_as_good_as_torch
from kvplane.kernels.cpu import simd
assert not simd.HAS_BF16_DOT
for dtype in (torch.bfloat16, torch.float16):
    batch = build(Case("generic", ((300, 40), (77, 1)), dtype=dtype, window=200))
    assert_as_good_as_torch(batch, *batch.attend())
print("right")
"""
    assert run_python(code, NUMBA_CPU_NAME="generic").strip() == "right"
