"""Arithmetic on Triton's number formats with the results of an NVIDIA GPU (PTX ISA, floating-point
instructions)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from triton_on_cpu.casts import Stored, as_fp32, converted, is_stored

Numbers = NDArray[Any]
Binary = Callable[[Any, Any], Any]
Unary = Callable[[Any], Any]


def to_numpy(x: Stored, dtype: Any) -> Numbers:
    """``x`` as an array with which numpy can compute: bf16 and FP8 as fp32, others unchanged."""
    return as_fp32(x, dtype) if is_stored(dtype) else x


def to_storage(x: Numbers, dtype: Any) -> Stored:
    """``x`` rounded once to ``dtype``, if that is bf16 or FP8, in the interpreter's storage format;
    booleans and other dtypes are unchanged."""
    if x.dtype == np.bool_ or not is_stored(dtype):
        return x
    return converted(x.astype(np.float32), tl.float32, dtype)


def one_nan(x: Numbers) -> Numbers:
    """``x`` with every NaN replaced by that of a GPU's arithmetic, whose bits are all 1 except the
    sign. A clamp distinguishes it from x86's NaN, whose sign is set."""
    if not np.issubdtype(x.dtype, np.floating):
        return x
    whole = np.dtype(f"i{x.dtype.itemsize}")
    nan = np.full((), np.iinfo(whole).max, whole).view(x.dtype)
    return np.where(np.isnan(x), nan, x)


def smaller(a: Numbers, b: Numbers) -> Numbers:
    """``min``: the other operand where one is NaN; -0 is less than +0."""
    return _zeros(np.fmin(a, b), a, b, negative=np.logical_or)


def larger(a: Numbers, b: Numbers) -> Numbers:
    """``max``: the other operand where one is NaN; -0 is less than +0."""
    return _zeros(np.fmax(a, b), a, b, negative=np.logical_and)


def smaller_or_nan(a: Numbers, b: Numbers) -> Numbers:
    """``min.NaN``: NaN where one operand is NaN; -0 is less than +0."""
    return _zeros(np.minimum(a, b), a, b, negative=np.logical_or)


def larger_or_nan(a: Numbers, b: Numbers) -> Numbers:
    """``max.NaN``: NaN where one operand is NaN; -0 is less than +0."""
    return _zeros(np.maximum(a, b), a, b, negative=np.logical_and)


def _zeros(found: Numbers, a: Numbers, b: Numbers, *, negative: Binary) -> Numbers:
    sign = np.where(negative(np.signbit(a), np.signbit(b)), -1.0, 1.0)
    zero = np.copysign(np.zeros((), found.dtype), sign)
    return np.where((a == 0) & (b == 0), zero, found).astype(found.dtype)


def clamped(x: Numbers, least: Numbers, most: Numbers, *, propagates: bool) -> Numbers:
    """``tl.clamp``. Unless it ``propagates`` NaN, NaN becomes the lower limit. If the limits are
    one number and its negative, Triton uses ``min.xorsign.abs``, and NaN becomes the limit with
    NaN's sign (seen on an H200 with Triton 3.6)."""
    if propagates:
        return larger_or_nan(smaller_or_nan(x, most), least)
    found = smaller(larger(x, least), most)
    if not _opposite(least, most):
        return found
    return np.where(np.isnan(x), np.copysign(most, x), found).astype(found.dtype)


def _opposite(least: Numbers, most: Numbers) -> bool:
    """True if the upper limit is the same number everywhere and the lower limit its negative."""
    return bool(np.size(most) and (most == np.ravel(most)[0]).all() and (least == -most).all())


def largest_of(x: Numbers, axis: Any, *, keepdims: bool) -> Numbers:
    """``tl.max``: NaN only where all elements are NaN."""
    some = np.where(np.isnan(x), -np.inf, x).max(axis=axis, keepdims=keepdims)
    return np.where(np.isnan(x).all(axis=axis, keepdims=keepdims), np.nan, some).astype(x.dtype)


def smallest_of(x: Numbers, axis: Any, *, keepdims: bool) -> Numbers:
    """``tl.min``: NaN only where all elements are NaN."""
    return -largest_of(-x, axis, keepdims=keepdims)


def fused(a: Numbers, b: Numbers, c: Numbers) -> NDArray[np.float32]:
    """a b + c in fp32, rounded to odd, so that rounding it again to fewer bits gives the same as a
    single rounding (Boldo and Melquiond 2008). For fp32 results see ``fused_fp32``."""
    return _odd_fp32(_odd_sum(a, b, c))


def fused_fp32(a: Numbers, b: Numbers, c: Numbers) -> NDArray[np.float32]:
    """``fma.rn.f32``."""
    return _odd_sum(a, b, c).astype(np.float32)


def _odd_sum(a: Numbers, b: Numbers, c: Numbers) -> NDArray[np.float64]:
    """a b + c in fp64, rounded to odd. The product of two fp32 numbers is exact in fp64, and the
    rounding error of the sum is computed exactly (Knuth's two-sum)."""
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    bits = np.array(total).view(np.int64)
    inexact = np.isfinite(total) & np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    away = (lost > 0) == (total > 0)
    return (bits + np.where(inexact, np.where(away, 1, -1), 0)).view(np.float64)


def _odd_fp32(x: NDArray[np.float64]) -> NDArray[np.float32]:
    near = x.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(x)
    cut = np.where(beyond, np.nextafter(near, np.float32(0)), near).astype(np.float32)
    inexact = np.isfinite(x) & (cut.astype(np.float64) != x)
    return (
        (np.atleast_1d(cut).view(np.int32) | np.atleast_1d(inexact))
        .view(np.float32)
        .reshape(np.shape(x))
    )


def flushed(x: Numbers) -> Numbers:
    """``x`` with subnormal fp32 numbers as zeros, as libdevice's functions and ``.ftz`` do."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def with_flushed_input(function: Unary) -> Unary:
    """``function`` with subnormal fp32 operands taken for zeros."""
    return lambda x: function(flushed(x))


def in_fp64(function: Unary) -> Unary:
    """``function`` computed in fp64 and rounded once. numpy's own functions of fp32 are one unit in
    the last place off for some results, 2^127 among them."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def sqrt(x: Numbers) -> Numbers:
    """``sqrt.approx.ftz``, rounded correctly."""
    return np.asarray(np.sqrt(flushed(x)))


def rsqrt(x: Numbers) -> Numbers:
    """``rsqrt.approx.ftz``, rounded correctly."""
    return np.asarray(in_fp64(lambda wide: 1.0 / np.sqrt(wide))(flushed(x)))


def erf(x: Numbers) -> Numbers:
    """libdevice's ``erf``, rounded correctly."""
    wide = torch.erf(torch.from_numpy(np.array(flushed(x), np.float64)))
    return np.asarray(wide.numpy().astype(x.dtype))


def whole(x: Numbers, target: Any) -> NDArray[Any]:
    """``cvt.rzi``: truncates towards zero to the integer dtype ``target`` and saturates; NaN
    becomes 0."""
    ends = np.iinfo(target)
    cut = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
    inside = (cut > float(ends.min)) & (cut < float(ends.max))
    beyond = np.where(cut >= float(ends.max), ends.max, ends.min).astype(target)
    return np.where(inside, np.where(inside, cut, 0.0).astype(target), beyond)


def product(a: Stored, a_dtype: Any, b: Stored, b_dtype: Any, c: Stored) -> Numbers:
    """``tl.dot``: a b + c in c's dtype, in which the operands are exact; the order of sums is
    numpy's."""
    operands = (to_numpy(x, dtype).astype(c.dtype) for x, dtype in ((a, a_dtype), (b, b_dtype)))
    return np.asarray(np.matmul(*operands) + c)


def e8m0_up(x: Numbers) -> NDArray[np.int64]:
    """``cvt.rp.satfinite.ue8m0x2.f32`` for one number: its exponent byte, rounded up; NaN gives
    255."""
    bits = np.abs(x).astype(np.float32).view(np.uint32).astype(np.int64)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = np.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return np.where(np.isnan(x), 255, np.minimum(exponent + up, 254))


#: The values of E2M1's eight codes without a sign.
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1_nearest(even: Numbers, odd: Numbers) -> NDArray[np.int64]:
    """``cvt.rn.satfinite.e2m1x2.f32``: two numbers in a byte, ties to even, ``odd`` in the upper
    half. NaN, which E2M1 does not have, becomes 6."""

    def code(x: Numbers) -> NDArray[np.int64]:
        low, part = _between(x)
        up = (part > 0.5) | ((part == 0.5) & (low % 2 == 1))
        return _with_sign(low + up, x)

    return code(even) | (code(odd) << 4)


def e2m1_by_chance(even: Numbers, odd: Numbers, bits: Numbers) -> NDArray[np.int64]:
    """``cvt.rs.satfinite.e2m1x4.f32``, for two numbers: stochastic rounding, which adds 16 random
    bits to each number below its last code bit and truncates.

    Each byte uses its own 32 random bits; on a GPU, which converts two bytes at once, the second
    byte uses the bits of the first.
    """

    def code(x: Numbers, chance: Numbers) -> NDArray[np.int64]:
        low, part = _between(x)
        return _with_sign(low + (np.floor(part * 65536.0) + chance >= 65536.0), x)

    both = bits.astype(np.int64) & 0xFFFFFFFF
    return code(even, both & 0xFFFF) | (code(odd, both >> 16) << 4)


def _between(x: Numbers) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The code of the largest E2M1 number that is at most ``abs(x)``, and the position of
    ``abs(x)`` between it and the next as a fraction, 0 at the last."""
    size = np.fmin(np.abs(x).astype(np.float64), _E2M1[-1])
    low = np.searchsorted(_E2M1, size, side="right") - 1
    above = _E2M1[np.minimum(low + 1, 7)]
    step = np.where(low == 7, 1.0, above - _E2M1[low])
    return low, (size - _E2M1[low]) / step


def _with_sign(code: NDArray[np.int64], x: Numbers) -> NDArray[np.int64]:
    return code | (np.signbit(x) & ~np.isnan(x)).astype(np.int64) << 3
