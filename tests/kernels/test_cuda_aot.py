"""The launch table and the gate that compiles it: what may be launched, and that a spilled register is seen."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kvplane.kernels import UnsupportedFeatureError
from kvplane.kernels.cuda import aot, launch_table
from kvplane.kernels.cuda.aot import Batch, Compiled, complaints
from kvplane.kernels.cuda.launch_table import AttendLaunch, MergeLaunch, WriteLaunch


def entry_of(*, wide: bool = False, general: bool = False) -> AttendLaunch:
    pair = launch_table.attend(torch.bfloat16, torch.bfloat16, 64)
    return AttendLaunch(torch.bfloat16, torch.bfloat16, 64, general, wide, pair.wide if wide else pair.narrow)


@pytest.fixture(autouse=True)
def _no_driver_stays() -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active  # noqa: SLF001 - asking for the active one would look for a device
    yield
    driver._active = before  # noqa: SLF001


def test_the_table_is_small_and_names_every_launch_once() -> None:
    entries = list(launch_table.launches())
    assert len(set(entries)) == len(entries) <= 105
    names = [aot.name_of(entry) for entry in entries]
    assert len(set(names)) == len(names)
    assert {type(entry) for entry in entries} == {AttendLaunch, MergeLaunch, WriteLaunch}


def test_a_plan_fits_every_dtype_of_queries_its_cache_may_meet() -> None:
    for _, cache, dim in launch_table.ATTEND:
        pairs = [launch_table.attend(query, cache, dim) for query in launch_table.query_dtypes(cache, dim)]
        assert len({(pair.narrow.rows, pair.wide.rows) for pair in pairs}) == 1


def test_every_architecture_and_every_entry_is_selected() -> None:
    entries = set(launch_table.launches())
    usual, full = aot.selection(full=False), aot.selection(full=True)
    assert {entry for entry, sm in usual if sm == 90} == {*entries, None}
    assert {sm for _, sm in usual} == set(aot.ARCHITECTURES)
    assert len(full) == 3 * (len(entries) + 1) - sum(
        getattr(entry, "cache", None) == launch_table.E4M3 for entry in entries
    )
    assert set(usual) < set(full)


def test_devices_that_are_too_old() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"compute capability 7\.5 is below 8\.0"):
        launch_table.check_cache(torch.bfloat16, 128, 75)


def test_other_batches_compile_nothing_new() -> None:
    """Whatever is an argument of a launch is no constant of its kernel: one compilation serves all batches."""
    batches = (
        Batch(),
        Batch(kv_heads=1, group=1, block_size=1, lengths=(40,), queries=(40,)),
        Batch(kv_heads=3, group=7, block_size=256, lengths=(1, 700, 64, 9), queries=(1, 30, 64, 2)),
    )
    entries = (
        entry_of(),
        entry_of(wide=True, general=True),
        MergeLaunch(torch.bfloat16, 64),
        WriteLaunch(torch.bfloat16, torch.bfloat16, 64),
    )
    for entry in entries:
        wide = isinstance(entry, AttendLaunch) and entry.wide
        kernels = [aot.compiled_kernel(entry, 90, batch) for batch in batches]
        assert all(kernel is kernels[0] for kernel in kernels), aot.name_of(entry)
        assert ("wgmma" in kernels[0].asm["ptx"]) == wide


def test_an_entry_compiles_without_spills_and_with_wide_copies() -> None:
    compiled = aot.compile_entry(entry_of(), 90)
    assert compiled.spilled_bytes == 0
    assert compiled.wide_copies > 0
    assert 32 <= compiled.registers <= 255
    assert complaints([compiled]) == []


def test_lost_wide_copies_are_seen() -> None:
    lost = Compiled("entry", 90, 100, 0, 1024, 0, expects_wide_copies=True)
    assert complaints([lost]) == ["entry sm_90: no asynchronous copies of 16 bytes"]


@pytest.mark.parametrize("only", ["narrow plain bfloat16 on bfloat16 64", "blocks.cu"])
def test_planted_spills_make_the_gate_fail(only: str) -> None:
    registers = "16" if only == "blocks.cu" else "40"
    command = [sys.executable, "-m", "kvplane.kernels.cuda.aot", "--only", only, "--jobs", "1"]
    done = subprocess.run([*command, "--maxnreg", registers], capture_output=True, text=True, check=False)
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1, done.stderr
    assert result["spills"] == result["variants"] > 0
    assert "bytes are spilled" in done.stderr


def test_reports_that_are_none_are_refused() -> None:
    for report in ("", "Used 40 registers"):
        with pytest.raises(ValueError, match="not a report"):
            aot.parse_report(report)


def test_everything_imports_and_nothing_needs_a_driver() -> None:
    modules = ("backend", "raw", "aot", "emulation", "layer", "work", "launcher")
    code = ";".join(f"import kvplane.kernels.cuda.{name}" for name in modules)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)
