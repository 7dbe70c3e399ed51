"""Compile every entry of the launch table without a GPU, and fail when one spills a register.

    python -m kvplane.kernels.cuda.aot [--full] [--jobs N] [--only NAME] [--maxnreg N]

Every entry is compiled for sm_90, and those that `covers` picks for sm_80 and sm_100 (`--full`: every entry, for all
three). The launches are made by the same code that makes them on a device, on host tensors and with a driver that only
compiles, so that arguments are specialised as they are at run time: what is checked is what is launched. Registers and
spills are those that the wheel's own ptxas reports for the PTX; kernels in CUDA C go through NVRTC. The last line is a
JSON object.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from kvplane.kernels import planning
from kvplane.kernels.cuda import launch_table, launcher, raw
from kvplane.kernels.cuda.launch_table import AttendLaunch, Launch, MergeLaunch, WriteLaunch
from kvplane.kernels.cuda.launcher import Shape
from kvplane.kernels.cuda.layer import prepare_layer
from kvplane.kernels.cuda.work import lay_out_on_host, place_on_device
from kvplane.kernels.paged_kv import PagedKv

ARCHITECTURES = (90, 80, 100)
COVERING_DIMS = (128, 256)
"""Head dimensions whose kernels are checked for every architecture: the usual one, and the largest."""

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one entry needs on one architecture."""

    name: str
    sm: int
    registers: int
    spilled_bytes: int
    """Stores and loads."""
    shared_bytes: int
    wide_copies: int
    """Asynchronous copies of 16 bytes in the code."""
    expects_wide_copies: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What a launch is made for. None of it is a constant of the kernel, so any batch compiles the same."""

    kv_heads: int = 8
    group: int = 4
    block_size: int = 16
    lengths: tuple[int, ...] = (300, 90)
    queries: tuple[int, ...] = (1, 70)
    """New tokens of each sequence."""


class OfflineDriver:
    """What Triton asks a driver before it compiles, for a device that is not there."""

    def __init__(self, sm: int) -> None:
        self._sm = sm

    def get_current_device(self) -> int:
        """One per architecture: kernels are kept apart by it."""
        return self._sm

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - the interface is Triton's
        """None that would be used."""
        return 0

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._sm, 32)


class CompilingLauncher:
    """Takes launches and only compiles them."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.kernels: list[Any] = []

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Compile as a launch with these arguments would."""
        self.kernels.append(kernel.run(*arguments, grid=grid, warmup=True, **constants, **self._options))


def name_of(entry: Launch) -> str:
    """An entry for people."""

    def short(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    if isinstance(entry, AttendLaunch):
        role = "wide" if entry.wide else "narrow"
        flavour = "general" if entry.general else "plain"
        return f"attend {role} {flavour} {short(entry.query)} on {short(entry.cache)} {entry.head_dim}"
    if isinstance(entry, MergeLaunch):
        return f"merge {short(entry.out)} {entry.padded_dim}"
    return f"write {short(entry.rows)} to {short(entry.cache)} {entry.padded_dim}"


def launch_entry(entry: Launch, launch: launcher.Launcher, batch: Batch = Batch()) -> None:
    """Make the entry's launch for a batch."""
    head_dim = entry.head_dim if isinstance(entry, AttendLaunch) else entry.padded_dim
    cache = entry.out if isinstance(entry, MergeLaunch) else entry.cache
    width = -(-max(batch.lengths) // batch.block_size)
    tables = np.arange(1, 1 + width * len(batch.lengths)).reshape(len(batch.lengths), width)
    shape = (tables.size + 1, batch.kv_heads, batch.block_size, head_dim)
    keys, values = (torch.empty(shape, dtype=cache) for _ in range(2))
    paged = PagedKv.of(keys, values)
    layer, heads = prepare_layer(paged), batch.kv_heads * batch.group
    plan = planning.plan(paged.geometry, tables, batch.lengths, batch.queries, num_query_heads=heads)
    sizes = launch_table.sizes(cache, head_dim)
    work = place_on_device(plan, lay_out_on_host(plan, sizes.narrow, sizes.wide))
    facts = Shape(heads, batch.group, batch.block_size, head_dim, plan.scale, 0.0)
    if isinstance(entry, WriteLaunch):
        rows = torch.empty(plan.num_tokens, batch.kv_heads, head_dim, dtype=entry.rows)
        launcher.write(launch, entry, work.slots, layer, rows, rows, keys, values)
        return
    dtype = entry.query if isinstance(entry, AttendLaunch) else entry.out
    query, lse = torch.empty(plan.num_tokens, heads, head_dim, dtype=dtype), torch.empty(plan.num_tokens, heads)
    if isinstance(entry, MergeLaunch):
        launcher.merge(launch, entry, facts, work, query, lse)
    else:
        launcher.attend(launch, entry, facts, work, layer, query, keys, values, query, lse, upcast=False)


def ptxas_report(ptx: str, sm: int) -> tuple[int, int]:
    """Registers, and bytes of spill stores and loads, as Triton's own assembler reports them for PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    found = re.search(r"\.target (sm_\w+)", ptx)
    assert found is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(sm).path, "-v", f"--gpu-name={found[1]}", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return parse_report(report)


def parse_report(report: str) -> tuple[int, int]:
    """Registers and spilled bytes of all kernels in ptxas's words. Raises ValueError when there is none."""
    registers = [int(each) for each in _REGISTERS.findall(report)]
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(report)]
    if not registers or len(spills) < len(registers):
        raise ValueError(f"not a report of ptxas -v: {report!r}")
    return max(registers), sum(spills)


def compiled_kernel(entry: Launch, sm: int, batch: Batch, **options: Any) -> Any:
    """Triton's object for the launch of an entry."""
    from triton.runtime import driver

    offline: Any = OfflineDriver(sm)
    driver.set_active(offline)
    launch = CompilingLauncher(**options)
    launch_entry(entry, launch, batch)
    (kernel,) = launch.kernels
    return kernel


def compile_entry(entry: Launch, sm: int, **options: Any) -> Compiled:
    """Compile an entry for an architecture; `options` go to Triton on top of the entry's own."""
    kernel = compiled_kernel(entry, sm, Batch(), **options)
    ptx = kernel.asm["ptx"]
    registers, spilled = ptxas_report(ptx, sm)
    # One-byte caches are converted in registers on their way; their tiles are half as wide and loaded as they come.
    expects = isinstance(entry, AttendLaunch) and entry.cache not in launch_table.QUANTISED
    copies = len(re.findall(r"cp\.async\.cg\.shared\.global", ptx))
    return Compiled(name_of(entry), sm, registers, spilled, kernel.metadata.shared, copies, expects)


def compile_raw(sm: int, maxnreg: int | None = None) -> Compiled:
    """Compile blocks.cu for an architecture with NVRTC, which needs no driver for it."""
    nvrtc: Any = importlib.import_module("cupy.cuda").nvrtc

    options = [*raw.OPTIONS, f"-arch=sm_{sm}", "--ptxas-options=-v"]
    if maxnreg is not None:
        options.append(f"-maxrregcount={maxnreg}")
    program = nvrtc.createProgram(raw.SOURCE.read_text(), raw.SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, tuple(options))
        report = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    registers, spilled = parse_report(report)
    return Compiled(f"{raw.SOURCE.name} ({', '.join(raw.NAMES)})", sm, registers, spilled, 0, 0, False)


def covers(entry: Launch) -> bool:
    """Whether an entry is checked for every architecture."""
    dim = entry.head_dim if isinstance(entry, AttendLaunch) else entry.padded_dim
    return dim in COVERING_DIMS and (not isinstance(entry, AttendLaunch) or entry.general)


def selection(*, full: bool) -> list[tuple[Launch | None, int]]:
    """What is compiled: entries (None: blocks.cu) and architectures, the slowest first."""
    chosen: list[tuple[Launch | None, int]] = []
    for entry in launch_table.launches():
        cache = entry.cache if isinstance(entry, (AttendLaunch, WriteLaunch)) else entry.out
        chosen += [
            (entry, sm)
            for sm in ARCHITECTURES
            if (sm == 90 or full or covers(entry))
            and not (cache == launch_table.E4M3 and sm < launch_table.E4M3_CAPABILITY)
        ]
    chosen.sort(key=lambda each: not (isinstance(each[0], AttendLaunch) and each[0].wide))
    return [*chosen, *((None, sm) for sm in ARCHITECTURES)]


def _compile(job: tuple[Launch | None, int], options: dict[str, int]) -> Compiled:
    entry, sm = job
    return compile_raw(sm, **options) if entry is None else compile_entry(entry, sm, **options)


def complaints(compiled: Iterable[Compiled]) -> list[str]:
    """What makes the gate fail: spilled registers, and tiles that are not loaded by wide asynchronous copies."""
    found = []
    for each in compiled:
        if each.spilled_bytes:
            found.append(f"{each.name} sm_{each.sm}: {each.spilled_bytes} bytes are spilled")
        if each.expects_wide_copies and not each.wide_copies:
            found.append(f"{each.name} sm_{each.sm}: no asynchronous copies of 16 bytes")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Compile, print a table and one JSON object; returns 1 when something spills."""
    parser = argparse.ArgumentParser(prog="python -m kvplane.kernels.cuda.aot")
    parser.add_argument("--full", action="store_true", help="every entry for every architecture")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--maxnreg", type=int, help="allow so few registers, which plants spills: the gate must fail")
    given = parser.parse_args(arguments)
    begin = time.perf_counter()
    options = {} if given.maxnreg is None else {"maxnreg": given.maxnreg}
    jobs = [job for job in selection(full=given.full) if given.only in (name_of(job[0]) if job[0] else raw.SOURCE.name)]
    compiled = []
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for each in pool.map(_compile, jobs, repeat(options)):
            compiled.append(each)
            print(
                f"{each.name:56} sm_{each.sm:<4} {each.registers:4} registers {each.spilled_bytes:5} B spilled "
                f"{each.shared_bytes:7} B shared {each.wide_copies:4} cp.async",
                flush=True,
            )
    found = complaints(compiled)
    for line in found:
        print(line, file=sys.stderr)
    print(
        json.dumps(
            {
                "variants": len(compiled),
                "entries": len(list(launch_table.launches())),
                "spills": sum(each.spilled_bytes > 0 for each in compiled),
                "max_registers": max(each.registers for each in compiled),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
