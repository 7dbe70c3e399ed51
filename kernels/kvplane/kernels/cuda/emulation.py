"""The CUDA backend on a host without a device, for tests and for stepping through a kernel: slow, from the same source.

Triton's kernels run in its interpreter; those in CUDA C are compiled by the host's C compiler and run one thread after
the other. Set KVPLANE_EMULATE_CUDA=1 before the first plan; it takes the place of the CPU backend.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

VARIABLE = "KVPLANE_EMULATE_CUDA"
SOURCE = Path(__file__).with_name("blocks.cu")

_KERNELS = ("move_blocks", "copy_blocks", "checksum_blocks")
_SHIM = """
typedef struct { unsigned x, y, z, w; } uint4;
typedef struct { unsigned x, y, z; } uint3;
static uint3 blockIdx, threadIdx, blockDim;
static void atomicAdd(unsigned long long* at, unsigned long long value) { *at += value; }
#include "blocks.cu"
typedef void (*kernel)(i64, i64, i64, i64, i64, i64, i64, i64);
"""
# Integer arguments travel in registers of 64 bits in the C calling conventions of x86-64 and AArch64, whatever their
# width: one loop calls kernels of any signature of up to eight of them.
_LOOP = """
void run_{name}(unsigned gx, unsigned gy, unsigned threads, const i64* a) {{
  blockDim.x = threads;
  for (blockIdx.y = 0; blockIdx.y < gy; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gx; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
        ((kernel)(void*){name})(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
}}
"""


def wanted() -> bool:
    """Whether the CPU's tensors are to be served by the CUDA backend."""
    return os.environ.get(VARIABLE) == "1"


def prepare_interpreter() -> None:
    """Make Triton interpret what it decorates from now on; raises RuntimeError when it was imported without that."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs

    if not knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 must be set before triton is imported")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "emulated.c", Path(folder) / "emulated.so"
        source.write_text(_SHIM + "".join(_LOOP.format(name=name) for name in _KERNELS))
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-O1", "-w", "-shared", "-fPIC", f"-I{SOURCE.parent}", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def run_raw(name: str, grid: tuple[int, int], threads: int, arguments: tuple[Any, ...]) -> None:
    """Run a kernel of blocks.cu over its grid; tensors are passed by their addresses."""
    values = [each.data_ptr() if isinstance(each, Tensor) else int(each) for each in arguments]
    packed = (ctypes.c_int64 * 8)(*values)
    getattr(_library(), f"run_{name}")(*(ctypes.c_uint(each) for each in (*grid, threads)), packed)
