"""Sixteen float32 lanes as a value inside compiled kernels, on whatever vectors the host has.

LLVM lowers `<16 x float>` to one AVX-512 register, two AVX ones or four NEON ones: the kernels are written
once, and their speed does not hang on an auto-vectoriser. Nothing is fast-math except that a multiplication
may fuse with the addition that uses it, so NaN and -inf mean what they say.

Memory is named by byte address (an int64). The storage type is the *type* of a tag argument: a kernel is
compiled once per storage type, and no branch on it is left in a loop.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import models, register_model

from kvplane.kernels.cpu.jit import intrinsic

LANES = 16
TAG_F32 = np.float32(0)
TAG_BF16 = np.uint16(0)
TAG_F16 = np.int16(0)
TAG_E4M3 = np.uint8(0)
TAG_INT8 = np.int8(0)

I32, I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS = ir.VectorType(_F32, LANES)
INTS = ir.VectorType(I32, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_HALFS = ir.VectorType(ir.HalfType(), LANES)
_FUSE = ("contract",)
_target: Any = cpu_target.target_context
_TRIPLE, _, _FEATURES = _target.codegen().magic_tuple()
HAS_BF16_DOT = "+avx512bf16" in _FEATURES
"""Whether the compiler may use AVX512_BF16: a `multiply_add` of pairs then costs what one of float32 does."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


class _F32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = _F32x16()


@register_model(_F32x16)
class _F32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, FLOATS)


def operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn `emit(builder, *values)` into a function that compiled code calls with these parameter types."""

    def wrap(emit: Callable[..., Any]) -> Callable[..., Any]:
        def definition(_typingctx: Any, *_arguments: Any) -> Any:
            def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if result == types.void else value

            return result(*parameters), codegen

        # numba reads the arity from the signature and cannot see through *arguments
        names = ["typingctx", *(f"argument_{i}" for i in range(len(parameters)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        for name, value in (
            ("__signature__", signature),
            ("__name__", emit.__name__),
            ("__doc__", emit.__doc__),
        ):
            setattr(definition, name, value)
        return intrinsic(definition)

    return wrap


def constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def call_llvm(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def pointer_to(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _spread(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)


def _half_to_float(builder: Any, raw: Any) -> Any:
    if "+f16c" in _FEATURES or not _TRIPLE.startswith("x86_64"):
        return builder.fpext(builder.bitcast(raw, _HALFS), FLOATS)
    # LLVM would call a compiler library that is not linked: move the bits and let a product fix the exponent
    bits = builder.zext(raw, INTS)

    def masked(mask: int, shift: int) -> Any:
        part = builder.and_(bits, ir.Constant(INTS, [mask] * LANES))
        return builder.shl(part, ir.Constant(INTS, [shift] * LANES))

    magnitude = builder.fmul(builder.bitcast(masked(0x7FFF, 13), FLOATS), constant(2.0**112))
    special = builder.icmp_signed("==", masked(0x7C00, 0), ir.Constant(INTS, [0x7C00] * LANES))
    infinite = builder.or_(masked(0x03FF, 13), ir.Constant(INTS, [0x7F800000] * LANES))
    unsigned = builder.select(special, infinite, builder.bitcast(magnitude, INTS))
    return builder.bitcast(builder.or_(unsigned, masked(0x8000, 16)), FLOATS)


def _e4m3_to_float(builder: Any, raw: Any) -> Any:
    """Sign, exponent and mantissa moved to where float32 has them; a product fixes the exponent, subnormals too."""
    bits = builder.zext(raw, INTS)

    def every(number: int) -> Any:
        return ir.Constant(INTS, [number] * LANES)

    low = builder.and_(bits, every(0x7F))
    magnitude = builder.fmul(builder.bitcast(builder.shl(low, every(20)), FLOATS), constant(2.0**120))
    special = builder.icmp_signed("==", low, every(0x7F))
    unsigned = builder.select(special, every(0x7FC00000), builder.bitcast(magnitude, INTS))
    sign = builder.shl(builder.and_(bits, every(0x80)), every(24))
    return builder.bitcast(builder.or_(unsigned, sign), FLOATS)


@intrinsic
def load(_typingctx: Any, tag: Any, _address: Any) -> Any:
    """Sixteen consecutive elements of the tag's storage type, as float32."""

    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        if tag == types.float32:
            return builder.load(pointer_to(builder, values[1], FLOATS), align=4)
        if tag in (types.uint8, types.int8):
            small = builder.load(pointer_to(builder, values[1], _BYTES), align=1)
            if tag == types.uint8:
                return _e4m3_to_float(builder, small)
            return builder.sitofp(builder.sext(small, INTS), FLOATS)
        raw = builder.load(pointer_to(builder, values[1], _SHORTS), align=2)
        if tag == types.int16:
            return _half_to_float(builder, raw)
        # a bfloat16 is the upper half of the float32 of the same value
        return builder.bitcast(builder.shl(builder.zext(raw, INTS), ir.Constant(INTS, [16] * LANES)), FLOATS)

    return f32x16(tag, types.int64), codegen


@operation(types.void, types.int64, f32x16)
def store(builder: Any, address: Any, value: Any) -> None:
    """Store sixteen float32."""
    builder.store(value, pointer_to(builder, address, FLOATS), align=4)


@operation(f32x16, types.float32)
def splat(builder: Any, scalar: Any) -> Any:
    """The same float32 in every lane."""
    return _spread(builder, scalar)


@operation(f32x16, types.int64)
def splat_at(builder: Any, address: Any) -> Any:
    """The float32 at an address in every lane."""
    return _spread(builder, builder.load(pointer_to(builder, address, _F32), align=4))


@operation(f32x16, f32x16, f32x16, f32x16)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused where the host can."""
    return fused(builder, a, b, c)


def _round_to_bf16(builder: Any, value: Any) -> Any:
    """The nearest bfloat16 of each lane, ties to even, in the lower half of an int32."""
    bits = builder.bitcast(value, INTS)

    def every(number: int) -> Any:
        return ir.Constant(INTS, [number] * LANES)

    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    return builder.lshr(builder.add(builder.add(bits, every(0x7FFF)), odd), every(16))


@operation(f32x16, f32x16, f32x16)
def pair(builder: Any, a: Any, b: Any) -> Any:
    """Both rounded to bfloat16 and packed: a in the lower, b in the upper half of each lane."""
    upper = builder.shl(_round_to_bf16(builder, b), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(builder.or_(_round_to_bf16(builder, a), upper), FLOATS)


@intrinsic
def multiply_add(_typingctx: Any, kind: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """a * b + c; with a bfloat16 tag, lanes of a and b are pairs and both products are added."""

    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        _, a, b, c = values
        if kind == types.float32:
            return fused(builder, a, b, c)
        if HAS_BF16_DOT:
            pairs = (builder.bitcast(value, _BFLOATS) for value in (a, b))
            return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, c, *pairs)
        sixteen, upper = (ir.Constant(INTS, [number] * LANES) for number in (16, 0xFFFF0000))
        a, b = (builder.bitcast(value, INTS) for value in (a, b))
        low_a, low_b = (builder.bitcast(builder.shl(value, sixteen), FLOATS) for value in (a, b))
        high_a, high_b = (builder.bitcast(builder.and_(value, upper), FLOATS) for value in (a, b))
        return fused(builder, high_a, high_b, fused(builder, low_a, low_b, c))

    return f32x16(kind, f32x16, f32x16, f32x16), codegen


@operation(f32x16, types.int64, types.int64)
def zip_shorts(builder: Any, a: Any, b: Any) -> Any:
    """Sixteen 16-bit elements at each address, packed as by `pair`."""
    shorts = (builder.load(pointer_to(builder, address, _SHORTS), align=2) for address in (a, b))
    lower, upper = (builder.zext(value, INTS) for value in shorts)
    shifted = builder.shl(upper, ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(builder.or_(lower, shifted), FLOATS)


@operation(f32x16, f32x16, f32x16)
def add(builder: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return builder.fadd(a, b)


@operation(f32x16, f32x16, f32x16)
def sub(builder: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return builder.fsub(a, b)


@operation(f32x16, f32x16, f32x16)
def mul(builder: Any, a: Any, b: Any) -> Any:
    """a * b."""
    return builder.fmul(a, b)


@operation(f32x16, f32x16, f32x16)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger in each lane; where one is NaN, the other."""
    return call_llvm(builder, "llvm.maxnum.v16f32", FLOATS, a, b)


@operation(types.float32, f32x16)
def horizontal_sum(builder: Any, a: Any) -> Any:
    """The sum over the lanes by halving: one fixed order on every host."""
    value, width = a, LANES
    while width > 1:
        width //= 2
        indices = ir.VectorType(I32, width)
        low, high = (ir.Constant(indices, list(range(start, start + width))) for start in (0, width))
        none = ir.Constant(value.type, ir.Undefined)
        value = builder.fadd(builder.shuffle_vector(value, none, low), builder.shuffle_vector(value, none, high))
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(f32x16, *[f32x16] * LANES)
def horizontal_sums(builder: Any, *vectors: Any) -> Any:
    """The sums over the lanes of sixteen vectors, one per lane; each by halving, as `horizontal_sum`.

    Vectors are halved and joined two by two, so a sum costs three instructions instead of eight.
    """
    left, width = list(vectors), LANES
    while len(left) > 1:
        width //= 2
        starts = range(0, 2 * LANES, 2 * width)
        low, high = (
            ir.Constant(INTS, [start + shift + lane for start in starts for lane in range(width)])
            for shift in (0, width)
        )
        left = [
            builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
            for a, b in zip(left[::2], left[1::2], strict=True)
        ]
    return left[0]


@operation(f32x16, f32x16)
def max_of_quarters(builder: Any, a: Any) -> Any:
    """Lane i becomes the largest of lanes i, i + 4, i + 8 and i + 12, modulo 16."""
    for shift in (8, 4):
        turned = ir.Constant(INTS, [(lane + shift) % LANES for lane in range(LANES)])
        a = call_llvm(builder, "llvm.maxnum.v16f32", FLOATS, a, builder.shuffle_vector(a, a, turned))
    return a


@operation(f32x16, f32x16, f32x16, f32x16, types.float32)
def keep_between(builder: Any, value: Any, low: Any, high: Any, at: Any) -> Any:
    """The lanes of `value` whose low <= at < high, -inf in the others."""
    here = _spread(builder, at)
    seen = builder.and_(builder.fcmp_ordered("<=", low, here), builder.fcmp_ordered("<", here, high))
    return builder.select(seen, value, constant(float("-inf")))


@operation(f32x16, f32x16)
def or_zero(builder: Any, a: Any) -> Any:
    """The lanes of `a`, 0 in those that are -inf."""
    return builder.select(builder.fcmp_ordered("==", a, constant(float("-inf"))), constant(0.0), a)
