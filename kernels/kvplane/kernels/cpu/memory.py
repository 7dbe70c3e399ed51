"""Bytes at addresses, inside compiled kernels: copied, zeroed, read, prefetched, counted."""

from typing import Any

from llvmlite import ir
from numba.core import types

from kvplane.kernels.cpu.simd import I32, I64, call_llvm, operation, pointer_to


@operation(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at an address; the value before."""
    return builder.atomic_rmw("add", pointer_to(builder, address, I64), amount, "monotonic")


@operation(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line of an address, which need not be mapped."""
    pointer = pointer_to(builder, address, ir.IntType(8))
    flags = (ir.Constant(I32, flag) for flag in (0, 3, 1))
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *flags)


@operation(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, destination: Any, source: Any, count: Any) -> None:
    """Copy `count` bytes between places that do not overlap."""
    byte = ir.IntType(8)
    places = (pointer_to(builder, address, byte) for address in (destination, source))
    volatile = ir.Constant(ir.IntType(1), 0)
    call_llvm(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *places, count, volatile)


@operation(types.void, types.int64, types.int64)
def zero_bytes(builder: Any, destination: Any, count: Any) -> None:
    """Set `count` bytes to 0."""
    byte = ir.IntType(8)
    volatile = ir.Constant(ir.IntType(1), 0)
    arguments = (pointer_to(builder, destination, byte), ir.Constant(byte, 0), count, volatile)
    call_llvm(builder, "llvm.memset.p0.i64", ir.VoidType(), *arguments)


@operation(types.uint64, types.int64)
def load_word(builder: Any, address: Any) -> Any:
    """The 64-bit word at an address."""
    return builder.load(pointer_to(builder, address, I64), align=8)
