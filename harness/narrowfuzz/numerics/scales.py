"""Scale rules: from the amax of a granule to the factor its elements are quantised with.

Each is a ``ScaleRule``, which the reference and the bounds use. *Multiplicative* fp32 scales s
(torchao float8): codes = cast(x * s). *Inverse* ones X = 1/s (DeepSeek): codes = cast(x / X). *MX*
scales are such X = 2^E, stored as an E8M0 byte. The MX rules work on exponent and significand as
integers, so no logarithm can be off by one. NVFP4's rule is in ``two_level.py``.

>>> mx_exponent(np.float32([448.0, 449.0]), E4M3FN, "rceil").tolist()
[0, 1]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.formats import E4M3FN as E4M3FN  # re-exported for the example above
from narrowfuzz.numerics.formats import E8M0_BIAS, E8M0_NAN, F32, F64, Format, encode_e8m0

MxMode = Literal["floor", "rceil", "ceil", "even"]
#: One scale per granule, in the representation of its rule: fp32 numbers, E8M0 bytes, or records of
#: both levels.
Scale = NDArray[Any]
#: Broadcasts one number per granule to the elements.
Spread = Callable[[NDArray[Any]], NDArray[Any]]


class ScaleRule(ABC):
    """How the scale of a granule is computed and applied to its elements. A recipe may define its
    own rule."""

    #: True: every scale depends on the amax of the whole tensor.
    whole: ClassVar[bool] = False
    #: A Python expression for the value of a code, in scripts of findings: "{code} / {scale}", say;
    #: "": scripts show the codes and scales only.
    value_text: ClassVar[str] = ""

    @property
    def roundings(self) -> int:
        """Number of fp32 roundings by which scaled data may differ from data / ``unit``: those of
        the multiplier, and that of its product with the data; 0: only that product is rounded."""
        return 0

    @property
    def pow2(self) -> bool:
        """True if every scale is a power of two, so that scaling by itself rounds nothing."""
        return False

    @abstractmethod
    def of(self, amax: F32, fmt: Format) -> Scale:
        """The scale of each granule."""

    def as_built(self, amax: F32, fmt: Format, deviation: str) -> Scale | None:
        """See ``reference.scale_as_built``."""
        return None

    @abstractmethod
    def scaled(self, x: F32, scale: Scale, spread: Spread, deviation: str) -> F64 | F32:
        """The scaled data, as it is before the cast to codes."""

    @abstractmethod
    def unit(self, scale: Scale) -> F64:
        """The value that a code of 1 represents, for each scale."""

    def bounded(self, scale: Scale) -> F64:
        """``unit``, but infinite where data was multiplied by a number that is not finite."""
        return self.unit(scale)

    def values(self, decoded: F64, scale: Scale, spread: Spread) -> F64:
        """The values that codes represent; exact up to float64 rounding."""
        return np.asarray(decoded * spread(self.unit(scale)))

    def void(self, scale: Scale, fmt: Format) -> NDArray[Any]:
        """Mask of the scales under which codes mean nothing."""
        return np.isnan(self.unit(scale))


#: How s = max / amax is computed. "quotient": rounded to fp32 once. "reciprocal": as max times
#: 1 / amax, which rounds twice; so does ``448.0 / amax`` of an fp32 tensor in torch.
Division = Literal["quotient", "reciprocal"]


@dataclass(frozen=True)
class Fp32Scale(ScaleRule):
    """s = max / max(amax, eps) in fp32, optionally rounded down to a power of two."""

    eps: float
    power_of_two: bool
    division: Division = "quotient"
    value_text: ClassVar[str] = "{code} / {scale}"

    @property
    def pow2(self) -> bool:
        return self.power_of_two

    def of(self, amax: F32, fmt: Format) -> Scale:
        s = self._unrounded(amax, fmt)
        return pow2_floor(s) if self.power_of_two else s

    def as_built(self, amax: F32, fmt: Format, deviation: str) -> Scale | None:
        if deviation != "pow2_floor_by_log2" or not self.power_of_two:
            return None
        above = pow2_floor_by_log2(self._unrounded(amax, fmt))
        return np.where(above > 0, above, self.of(amax, fmt))

    def _unrounded(self, amax: F32, fmt: Format) -> F32:
        divide = max_over_amax if self.division == "quotient" else max_times_reciprocal
        return divide(amax, fmt, eps=self.eps)

    def scaled(self, x: F32, scale: Scale, spread: Spread, deviation: str) -> F64 | F32:
        return np.asarray(x * spread(scale), dtype=np.float32)

    def unit(self, scale: Scale) -> F64:
        with np.errstate(divide="ignore"):  # a scale of 0 has an infinite unit
            return np.asarray(1.0 / scale.astype(np.float64))

    def values(self, decoded: F64, scale: Scale, spread: Spread) -> F64:
        return np.asarray(decoded / spread(scale).astype(np.float64))

    def void(self, scale: Scale, fmt: Format) -> NDArray[Any]:
        """NaN scales, but only of formats without NaN: otherwise the codes themselves are NaN."""
        return np.isnan(scale) & (fmt.nan_code is None)


@dataclass(frozen=True)
class Fp32InverseScale(ScaleRule):
    """X = max(amax, eps) / max in fp32, optionally rounded up to a power of two. Data is divided by
    it, and codes are multiplied by it. Taps report X itself."""

    eps: float
    power_of_two: bool
    value_text: ClassVar[str] = "{code} * {scale}"

    @property
    def pow2(self) -> bool:
        return self.power_of_two

    def of(self, amax: F32, fmt: Format) -> Scale:
        with np.errstate(invalid="ignore"):
            x = np.divide(np.maximum(amax, np.float32(self.eps)), fmt.max, dtype=np.float32)
        return pow2_ceil(x) if self.power_of_two else x

    def scaled(self, x: F32, scale: Scale, spread: Spread, deviation: str) -> F64 | F32:
        return np.asarray(x / spread(scale), dtype=np.float32)

    def unit(self, scale: Scale) -> F64:
        return scale.astype(np.float64)

    def void(self, scale: Scale, fmt: Format) -> NDArray[Any]:
        """As of ``Fp32Scale``."""
        return np.isnan(scale) & (fmt.nan_code is None)


@dataclass(frozen=True)
class MxScale(ScaleRule):
    """X = 2^E as an E8M0 byte; ``inf_byte`` is the byte of a granule that contains an Inf."""

    mode: MxMode
    inf_byte: int
    value_text: ClassVar[str] = "{code} * 2.0 ** ({scale} - 127)"

    @property
    def pow2(self) -> bool:
        return True

    def of(self, amax: F32, fmt: Format) -> Scale:
        return mx_scale(amax, fmt, self.mode, inf_byte=self.inf_byte)

    def as_built(self, amax: F32, fmt: Format, deviation: str) -> Scale | None:
        if deviation != "rceil_by_log2" or self.mode != "rceil":
            return None
        other = mx_rceil_by_log2(amax, fmt)
        return np.where(np.isfinite(amax) & (amax > 0), other, self.of(amax, fmt))

    def scaled(self, x: F32, scale: Scale, spread: Spread, deviation: str) -> F64 | F32:
        factor = self.unit(scale)
        if deviation == "mx_byte0_times_one":
            factor = np.where(scale == 0, 1.0, factor)
        if deviation == "mx_byte0_min_normal":
            factor = np.where(scale == 0, 2.0**-126, factor)
        return np.asarray(x / spread(factor), dtype=np.float64)

    def unit(self, scale: Scale) -> F64:
        assert scale.dtype == np.uint8
        return mx_factor(scale)


def max_over_amax(amax: F32, fmt: Format, *, eps: float) -> F32:
    """s = fp32(max / fp64(max(amax, eps))), as torchao's ``amax_to_scale`` defines it.

    Inf gives 0, NaN gives NaN. Source: torchao ``float8/float8_utils.py``.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        wide = np.maximum(amax.astype(np.float64), eps)  # np.maximum propagates NaN, as clamp does
        return np.asarray(fmt.max / wide, dtype=np.float64).astype(np.float32)


def max_times_reciprocal(amax: F32, fmt: Format, *, eps: float) -> F32:
    """s = max * (1 / max(amax, eps)), both in fp32; source: ``Tensor.__rtruediv__`` of torch."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        reciprocal = np.float32(1.0) / np.maximum(amax, np.float32(eps))
        return np.asarray(np.float32(fmt.max) * reciprocal, dtype=np.float32)


#: Elements of a row, or rows and columns, that share a scale of TransformerEngine's FP8 block
#: scaling.
FP8_BLOCK = 128
#: Elements along a block of NVFP4.
FP4_BLOCK = 16


def current_scale(amax: F32, largest: float) -> F32:
    """TransformerEngine's scale for each amax: the format's maximum divided by it, at most the
    largest fp32 number; 1 for an amax of 0 or Inf (``compute_scale_from_amax`` in
    common/recipe/recipe_common.cuh)."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = np.minimum(np.float32(largest) / amax, np.finfo(np.float32).max)
    return np.where(np.isfinite(amax) & (amax != 0.0), scale, 1.0).astype(np.float32)


def pow2_floor(s: F32) -> F32:
    """The largest power of two that is at most ``s``; 0, Inf and NaN are unchanged."""
    # the significand is cleared: every nonzero fp32 number is a normal float64 number
    exponent = s.astype(np.float64).view(np.int64) & (0x7FF << 52)
    return np.where(np.isnan(s), s, exponent.view(np.float64)).astype(np.float32)


def pow2_ceil(x: F32) -> F32:
    """The smallest power of two that is at least ``x``; 0, Inf and NaN are unchanged."""
    below = pow2_floor(x)
    return np.where(below == x, below, np.float32(2.0) * below)


def pow2_floor_by_log2(s: F32) -> F32:
    """The power of two *above* s where fp32 ``floor(log2(s))`` cannot tell the two apart, else 0.

    ``exp2(floor(log2(s)))`` rounds log2 to fp32 first: just below 2^k it rounds to k. One ulp of
    slack covers the vectorised log2, which is not correctly rounded.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.log2(s.astype(np.float64))
        finite = np.isfinite(exact)
        log2 = np.where(finite, exact, 0.0).astype(np.float32)
        upper = np.floor(np.nextafter(log2, np.float32(np.inf)))
    above = np.where(finite & (upper > np.floor(exact)), np.exp2(upper.astype(np.float64)), 0.0)
    return above.astype(np.float32)


def mx_exponent(amax: F32, fmt: Format, mode: MxMode) -> NDArray[np.int64]:
    """Unclamped E of X = 2^E for finite positive ``amax`` = m * 2^e, 1 <= m < 2.

    ``floor`` (OCP MX v1.0): e - emax. ``rceil`` (NVIDIA): smallest E with amax/2^E <= max.
    ``ceil``: floor, plus one unless amax is a power of two. ``even``: round m half up to the
    element's mantissa width first, then floor.
    """
    half, exponent = np.frexp(amax.astype(np.float64))
    m, e = 2.0 * half, exponent.astype(np.int64) - 1
    if mode == "rceil":
        e = e + (m > fmt.max / 2.0**fmt.emax)
    elif mode == "ceil":
        e = e + (m > 1.0)
    elif mode == "even":
        steps = 2.0**fmt.mantissa_bits
        e = e + (np.floor(m * steps + 0.5) / steps >= 2.0)
    elif mode != "floor":
        raise ValueError(f"unknown MX scale mode {mode!r}: use floor, rceil, ceil or even")
    return e - fmt.emax


def mx_rceil_by_log2(amax: F32, fmt: Format) -> NDArray[np.uint8]:
    """The byte *below* the rule's where fp32 ``ceil(log2(amax / max))`` can fall short, else the
    rule's own.

    log2 rounded to fp32 cannot see a quotient a few ulp above a power of two; one ulp of slack
    covers the vectorised log2.
    """
    ordinary = np.isfinite(amax) & (amax > 0)
    quotient = np.where(ordinary, amax, np.float32(1.0)) / np.float32(fmt.max)
    # a quotient may underflow to 0; every exponent below -127 becomes byte 0
    smallest = np.maximum(quotient.astype(np.float64), 2.0**-200)
    log2 = np.log2(smallest).astype(np.float32)
    lower = np.ceil(np.nextafter(log2, np.float32(-np.inf))).astype(np.int64)
    byte = encode_e8m0(lower)
    rule = encode_e8m0(mx_exponent(np.where(ordinary, amax, np.float32(1.0)), fmt, "rceil"))
    return np.where(ordinary, np.minimum(byte, rule), rule).astype(np.uint8)


def mx_scale(amax: F32, fmt: Format, mode: MxMode, *, inf_byte: int) -> NDArray[np.uint8]:
    """E8M0 byte of each granule. Zero gives byte 0, NaN 0xFF, Inf ``inf_byte``, a policy of the
    recipe."""
    ordinary = np.isfinite(amax) & (amax > 0)
    byte = encode_e8m0(mx_exponent(np.where(ordinary, amax, np.float32(1.0)), fmt, mode))
    byte = np.where(amax == 0, 0, byte)
    byte = np.where(np.isinf(amax), inf_byte, byte)
    return np.where(np.isnan(amax), E8M0_NAN, byte).astype(np.uint8)


def mx_scale_by_reciprocal(amax: F32, fmt: Format) -> NDArray[np.uint8]:
    """E8M0 bytes as TransformerEngine's kernels make them: amax times fp32(1/max), rounded to fp32,
    then up to a power of two. Zero gives byte 0, Inf 254; NaN elements were left out of amax.

    Source: ``float_to_e8m0`` in ``common/util/ptx.cuh``.
    """
    with np.errstate(over="ignore", under="ignore"):
        quotient = (amax * np.float32(1.0 / fmt.max)).astype(np.float32)
    finite = np.where(np.isfinite(quotient), quotient, np.float32(1.0))
    half, exponent = np.frexp(finite.astype(np.float64))
    byte = encode_e8m0(exponent.astype(np.int64) - (half == 0.5))
    byte = np.where(finite == 0, 0, byte)
    return np.where(np.isfinite(quotient), byte, 254).astype(np.uint8)


def mx_factor(byte: NDArray[np.uint8]) -> F64:
    """X = 2^E as float64 (exact for every byte, also byte 0 = 2^-127); 0xFF gives NaN."""
    value = np.ldexp(1.0, byte.astype(np.int64) - E8M0_BIAS)
    return np.where(byte == E8M0_NAN, np.nan, value)
