"""Narrow number formats as data, with exact decode, round and encode.

A format is one literal in the table at the end; everything else is derived. Values are held
in float64, in which every value of every format here is exact. Rounding is nearest, ties to even;
overflow is decided after rounding (OCP OFP8 rev 1.0, section 5).

>>> round_to(np.array([463.9, 464.0, 464.1]), E4M3FN).tolist()
[448.0, 448.0, 448.0]
>>> round_to(np.array([464.0, 464.1]), E4M3FN, overflow="ieee").tolist()
[448.0, nan]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]
Codes = NDArray[np.unsignedinteger[Any]]

#: What a cast does with values past the largest finite one. ``saturate``: finite overflow and Inf
#: become the signed maximum. ``ieee``: overflow becomes Inf, or NaN in a format without Inf.
Overflow = Literal["saturate", "ieee"]
#: To the nearest value, ties to even; or to either of the two neighbours, at random.
CastRounding = Literal["nearest", "stochastic"]

_F64_BIAS = 1023
_F64_MANTISSA = 52


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: 1 sign bit, then exponent, then mantissa."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    #: ``ieee``: the top exponent holds Inf and NaN. ``fn``: only the all-ones code is NaN and there
    #: is no Inf. ``none``: neither.
    specials: Literal["ieee", "fn", "none"]

    @cached_property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        return (1 << self.exponent_bits) - 1 - self.bias - (self.specials == "ieee")

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        top = 2.0 - 2.0**-self.mantissa_bits * (2 if self.specials == "fn" else 1)
        return float(np.ldexp(top, self.emax))

    @cached_property
    def min_normal(self) -> float:
        return float(np.ldexp(1.0, self.emin))

    @cached_property
    def min_subnormal(self) -> float:
        return float(np.ldexp(1.0, self.emin - self.mantissa_bits))

    @cached_property
    def unit_roundoff(self) -> float:
        """u = 2^-p with p significant bits: one rounding errs by at most u/(1+u), relatively."""
        return float(2.0 ** -(self.mantissa_bits + 1))

    @cached_property
    def code_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)

    @cached_property
    def nan_code(self) -> int | None:
        """The canonical (positive, quiet) NaN code, or None where the format has none."""
        if self.specials == "none":
            return None
        ones = (1 << (self.bits - 1)) - 1
        if self.specials == "fn":
            return ones
        return ones & ~((1 << (self.mantissa_bits - 1)) - 1)

    @cached_property
    def inf_code(self) -> int | None:
        if self.specials != "ieee":
            return None
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @cached_property
    def table(self) -> F64:
        """Value of every code, for formats of at most 16 bits."""
        assert self.bits <= 16, self.name
        return _decode_arithmetic(np.arange(1 << self.bits, dtype=np.uint32), self)


def _decode_arithmetic(codes: Codes, fmt: Format) -> F64:
    wide = codes.astype(np.int64)
    sign = np.where((wide >> (fmt.bits - 1)) & 1, -1.0, 1.0)
    exponent = (wide >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = wide & ((1 << fmt.mantissa_bits) - 1)
    subnormal = exponent == 0
    significand = np.where(subnormal, 0, 1 << fmt.mantissa_bits) + mantissa
    power = np.where(subnormal, 1, exponent) - fmt.bias - fmt.mantissa_bits
    value = sign * np.ldexp(significand.astype(np.float64), power)
    magnitude = wide & ((1 << (fmt.bits - 1)) - 1)
    if fmt.specials == "ieee":
        assert fmt.inf_code is not None
        value = np.where(magnitude == fmt.inf_code, sign * np.inf, value)
        value = np.where(magnitude > fmt.inf_code, np.nan, value)
    elif fmt.specials == "fn":
        value = np.where(magnitude == fmt.nan_code, np.nan, value)
    return np.asarray(value, dtype=np.float64)


def decode(codes: Codes, fmt: Format) -> F64:
    """The exact value of each code."""
    if fmt.bits <= 16:
        return fmt.table[codes]
    return _decode_arithmetic(codes, fmt)


def round_to(x: F64 | F32, fmt: Format, *, overflow: Overflow = "saturate") -> F64:
    """Round each value once to the nearest value of ``fmt``, ties to even.

    For fp32 numpy's cast rounds. For other formats the quantum 2^q of each element is known from
    its exponent; adding and subtracting 1.5 * 2^(q+52) makes float64's own rounding do the work,
    exactly (at most 24 bits are kept).
    """
    # invalid: widening a signalling NaN raises the flag
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        x = np.asarray(x, dtype=np.float64)
        if fmt is FP32:
            rounded = x.astype(np.float32).astype(np.float64)
            if overflow == "ieee":
                return rounded  # the cast has made overflow infinite
        else:
            rounded = _rounded(x, fmt)
        too_big = np.abs(rounded) > fmt.max
    if not too_big.any():
        return rounded
    if overflow == "saturate" or fmt.specials == "none":
        limit: F64 | float = fmt.max
    else:
        limit = np.inf if fmt.specials == "ieee" else np.nan
    return np.where(too_big, np.copysign(limit, x), rounded)


def _rounded(x: F64, fmt: Format) -> F64:
    """Round to the format's precision as if its exponents had no upper limit."""
    magic = np.asarray(x.view(np.int64) & (0x7FF << _F64_MANTISSA))
    np.maximum(magic, (fmt.emin + _F64_BIAS) << _F64_MANTISSA, out=magic)
    np.minimum(magic, (fmt.emax + 1 + _F64_BIAS) << _F64_MANTISSA, out=magic)
    magic += ((_F64_MANTISSA - fmt.mantissa_bits) << _F64_MANTISSA) | (1 << 51)
    shift = magic.view(np.float64)
    rounded = np.asarray(x + shift)
    rounded -= shift
    np.copysign(rounded, x, out=rounded)
    return rounded


def rounded_from(y: F64 | F32, fmt: Format) -> tuple[F64, F64] | None:
    """The least and the largest float64 that ``round_to`` with ``overflow="ieee"`` maps to each y;
    NaN for NaN. None if any y is not a value of the format, which must have IEEE's Inf and NaN.

    The tie between two neighbouring values belongs to the even one.
    """
    assert fmt.specials == "ieee", fmt.name
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        y = np.asarray(y, dtype=np.float64)
    size, infinite = np.abs(y), None
    if not np.max(size, initial=0.0) <= fmt.max:
        infinite = np.isinf(size)
        size = np.where(infinite, 2.0 ** (fmt.emax + 1), size)
    dropped = _F64_MANTISSA - fmt.mantissa_bits
    bits, half = size.view(np.int64), 1 << (dropped - 1)
    # the bits of a tie are those of its neighbours plus or minus half a step, in any binade
    odd = (bits >> dropped) & 1
    inner, outer = (bits - half + odd).view(np.float64), (bits + half - odd).view(np.float64)
    rest = bits & (2 * half - 1)
    small = size <= fmt.min_normal
    if small.any():
        few = size[small]
        steps = few / fmt.min_subnormal
        whole = steps.astype(np.int64)
        low, high = few - fmt.min_subnormal / 2.0, few + fmt.min_subnormal / 2.0
        inner[small] = np.where(whole & 1, np.nextafter(low, np.inf), low)
        outer[small] = np.where(whole & 1, np.nextafter(high, 0.0), high)
        rest[small] = steps != whole
    if rest.any() and rest[~np.isnan(y)].any():
        return None
    if infinite is not None:
        outer = np.where(infinite, np.inf, outer)
    negative = y < 0.0
    return np.where(negative, -outer, inner), np.where(negative, -inner, outer)


def neighbours(x: F64 | F32, fmt: Format) -> tuple[F64, F64]:
    """The largest value of ``fmt`` that is at most x and the smallest that is at least x: the two
    values that stochastic rounding may return.

    Equal where x is a value of the format or past its maximum. A zero has the sign of x.
    """
    with np.errstate(invalid="ignore"):
        x = np.clip(np.asarray(x, dtype=np.float64), -fmt.max, fmt.max)
        nearest = round_to(x, fmt)
        _, exponent = np.frexp(np.abs(x))
        step = np.ldexp(1.0, np.maximum(exponent - 1, fmt.emin) - fmt.mantissa_bits)
        low = np.where(nearest > x, nearest - step, nearest)
        high = np.where(nearest < x, nearest + step, nearest)
    return np.where(low == 0, np.copysign(0.0, x), low), np.where(
        high == 0, np.copysign(0.0, x), high
    )


def encode(x: F64 | F32, fmt: Format, *, overflow: Overflow = "saturate") -> Codes:
    """Round once and return the codes; NaN becomes the canonical NaN code.

    Raises ValueError for a NaN in a format that has none.
    """
    held: NDArray[Any] = np.asarray(x)
    if fmt.nan_code is None and np.isnan(held).any():
        raise ValueError(f"{fmt.name} has no NaN: mask NaN inputs before encoding")
    if fmt.bits > 8 or held.dtype not in _INTEGERS:
        return _encode_arithmetic(held, fmt, overflow)
    integer = _INTEGERS[held.dtype]
    dropped, table = _encode_table(fmt, overflow, integer)
    bits, rest = held.view(integer), integer.type((1 << dropped) - 1)
    # a set sign bit makes the index negative, so it counts from the table's end
    return np.asarray(table[(((bits & rest) + rest) | bits) >> dropped])


_INTEGERS = {np.dtype(f): np.dtype(i) for f, i in (("f4", np.int32), ("f8", np.int64))}


@cache
def _encode_table(fmt: Format, overflow: Overflow, integer: np.dtype[Any]) -> tuple[int, Codes]:
    """The number of low bits of a float that are dropped to make an index, and the code for each
    index.

    An index is the sign, the exponent and a significand of two bits more than the format's, the
    last of which is set if any dropped bit is. Rounding to odd in this way loses nothing: two more
    bits distinguish numbers below, on and above a tie.
    """
    width = integer.itemsize * 8
    mantissa = {32: 23, 64: 52}[width]
    dropped = mantissa - fmt.mantissa_bits - 2
    heads = np.arange(1 << (width - dropped), dtype=np.int64) << dropped
    values = heads.astype(integer).view(f"f{integer.itemsize}")
    if fmt.nan_code is None:
        values = np.where(np.isnan(values), 0.0, values)
    return dropped, _encode_arithmetic(values, fmt, overflow)


def _encode_arithmetic(x: F64 | F32, fmt: Format, overflow: Overflow) -> Codes:
    value = round_to(x, fmt, overflow=overflow)
    magnitude = np.abs(value)
    normal = (magnitude.view(np.int64) >> (_F64_MANTISSA - fmt.mantissa_bits)) - (
        (_F64_BIAS - fmt.bias) << fmt.mantissa_bits
    )
    with np.errstate(invalid="ignore", over="ignore"):
        subnormal = (magnitude * (1.0 / fmt.min_subnormal)).astype(np.int64)
    code = np.where(magnitude >= fmt.min_normal, normal, subnormal)
    code |= np.signbit(value).astype(np.int64) << (fmt.bits - 1)
    finite = np.isfinite(value)
    if not finite.all():
        nan = np.isnan(value)
        if nan.any():
            code = np.where(nan, fmt.nan_code or 0, code)
        if (~finite & ~nan).any():
            assert fmt.inf_code is not None
            signed = np.where(np.signbit(value), 1 << (fmt.bits - 1), 0) | fmt.inf_code
            code = np.where(np.isinf(value), signed, code)
    return code.astype(fmt.code_dtype)


def canonical(codes: Codes, fmt: Format) -> Codes:
    """Codes with every NaN replaced by the canonical one: NaN signs and payloads are noise."""
    if fmt.nan_code is None:
        return codes
    return np.where(np.isnan(decode(codes, fmt)), fmt.nan_code, codes).astype(fmt.code_dtype)


E4M3FN = Format("e4m3fn", 4, 3, 7, "fn")
E5M2 = Format("e5m2", 5, 2, 15, "ieee")
E2M1 = Format("e2m1", 2, 1, 1, "none")
BF16 = Format("bf16", 8, 7, 127, "ieee")
FP16 = Format("fp16", 5, 10, 15, "ieee")
FP32 = Format("fp32", 8, 23, 127, "ieee")

FORMATS = {f.name: f for f in (E4M3FN, E5M2, E2M1, BF16, FP16, FP32)}

# E8M0 is a scale, not an element: 8 exponent bits and nothing else. No sign, no zero, no Inf.
E8M0_BIAS = 127
E8M0_NAN = 0xFF


def encode_e8m0(exponent: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The code of 2^exponent, clamped to the format's range [-127, 127]."""
    return (np.clip(exponent, -E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).astype(np.uint8)
