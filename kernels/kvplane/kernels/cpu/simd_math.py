"""Functions of sixteen lanes that hosts have no instruction for."""

from typing import Any

from llvmlite import ir

from kvplane.kernels.cpu.simd import FLOATS, INTS, LANES, call_llvm, constant, f32x16, fused, operation


def _exp(builder: Any, a: Any) -> Any:
    x = call_llvm(builder, "llvm.maxnum.v16f32", FLOATS, a, constant(-87.0))
    n = call_llvm(builder, "llvm.rint.v16f32", FLOATS, builder.fmul(x, constant(1.4426950408889634)))
    r = fused(builder, n, constant(-0.693359375), x)
    r = fused(builder, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fused(builder, p, r, constant(coefficient))
    p = fused(builder, builder.fmul(p, r), r, builder.fadd(r, constant(1.0)))
    exponent = builder.shl(builder.fptosi(n, INTS), ir.Constant(INTS, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(p, INTS), exponent), FLOATS)
    positive = builder.select(builder.fcmp_ordered("<", a, constant(-87.0)), constant(0.0), scaled)
    return builder.select(builder.fcmp_unordered("uno", a, a), a, positive)


@operation(f32x16, f32x16)
def exp(builder: Any, a: Any) -> Any:
    """e to the a within 2 ulp, for a <= 88; 0 below -87 and for -inf; NaN for NaN.

    Cody-Waite reduction to [-ln2/2, ln2/2], then the degree-6 polynomial of Cephes' expf.
    """
    return _exp(builder, a)


@operation(f32x16, f32x16)
def tanh(builder: Any, a: Any) -> Any:
    """The hyperbolic tangent within 4 ulp; NaN for NaN. Cephes' tanhf: a polynomial near 0, exp elsewhere."""
    z = builder.fmul(a, a)
    p = constant(-5.70498872745e-3)
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = fused(builder, p, z, constant(coefficient))
    near = fused(builder, builder.fmul(p, z), a, a)
    # beyond ±20 the result is ±1 in float32, and exp must not overflow
    low = call_llvm(builder, "llvm.minnum.v16f32", FLOATS, a, constant(20.0))
    clamped = call_llvm(builder, "llvm.maxnum.v16f32", FLOATS, low, constant(-20.0))
    e = _exp(builder, builder.fmul(clamped, constant(2.0)))
    far = builder.fsub(constant(1.0), builder.fdiv(constant(2.0), builder.fadd(e, constant(1.0))))
    value = builder.select(builder.fcmp_ordered("<", z, constant(0.390625)), near, far)
    return builder.select(builder.fcmp_unordered("uno", a, a), a, value)
