"""Formats against two independent implementations, at zero tolerance.

Small spaces are walked completely (every code, every bf16 value), fp32 by a prime stride, so that
every exponent meets many mantissas.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gfloat import RoundMode, decode_ndarray, encode_ndarray, round_ndarray
from gfloat.formats import (
    format_info_bfloat16,
    format_info_binary16,
    format_info_ocp_e2m1,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
)
from narrowfuzz.numerics.formats import (
    BF16,
    E2M1,
    E4M3FN,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    Format,
    Overflow,
    canonical,
    decode,
    encode,
    encode_e8m0,
    round_to,
    rounded_from,
)
from numpy.typing import NDArray

ML: dict[str, Any] = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
}
GF = {
    "e4m3fn": format_info_ocp_e4m3,
    "e5m2": format_info_ocp_e5m2,
    "e2m1": format_info_ocp_e2m1,
    "bf16": format_info_bfloat16,
    "fp16": format_info_binary16,
}
NARROW = (E4M3FN, E5M2, E2M1, BF16, FP16)
POLICIES: tuple[Overflow, ...] = ("saturate", "ieee")

# Policy differences with ml_dtypes, which has one built-in answer per format:
#   (format, our policy) -> (smallest magnitude that differs, ours, theirs).
# A pair that is not listed must agree on every number. Thresholds are where rounding first leaves
# the finite range: 464 itself is a tie that goes down to 448, 61440 a tie that goes up.
ML_DIFFERS: dict[tuple[str, Overflow], tuple[float, float, float]] = {
    ("e4m3fn", "saturate"): (float(np.nextafter(np.float32(464), np.float32(1e9))), 448.0, np.nan),
    ("e5m2", "saturate"): (61440.0, 57344.0, np.inf),
    ("bf16", "saturate"): (2.0**128 * (1 - 2.0**-9), BF16.max, np.inf),
    ("fp16", "saturate"): (65520.0, 65504.0, np.inf),
}
# ml_dtypes also has an answer for NaN in e2m1, where we have none: a signed zero.
ML_NAN = {"e2m1": 0.0}
# gfloat's ``sat`` is our ``saturate``; it refuses what cannot be kept where we saturate instead.
GF_REFUSES = {("e2m1", "ieee")}


def all_bf16() -> NDArray[np.float32]:
    return (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)


def strided_fp32() -> NDArray[np.float32]:
    return np.arange(0, 1 << 32, 8191, dtype=np.int64).astype(np.uint32).view(np.float32)


def around_every_boundary(fmt: Format) -> NDArray[np.float32]:
    """Every midpoint of two neighbours and every value of ``fmt``, with fp32 neighbours."""
    finite = np.unique(fmt.table[np.isfinite(fmt.table)])
    top = fmt.max + (fmt.max - finite[-2])
    grid = np.concatenate([finite, [top, -top]])
    grid.sort()
    with np.errstate(over="ignore"):  # past bf16's maximum fp32 has only Inf left
        edges = np.concatenate([grid, (grid[:-1] + grid[1:]) / 2]).astype(np.float32)
    near = (np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf)))
    return np.concatenate([edges, *near])


INPUTS = {"bf16": all_bf16, "fp32": strided_fp32}


def same(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Equal including the sign of zero; any NaN equals any NaN."""
    nan = np.isnan(a) & np.isnan(b)
    return nan | ((a == b) & (np.signbit(a) == np.signbit(b)))


def to_ml(x: NDArray[Any], fmt: Format) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return x.astype(ML[fmt.name])


def widen(x: NDArray[Any]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # signalling NaN patterns are among the inputs
        return x.astype(np.float64)


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_every_code_decodes_as_ml_dtypes_says(fmt: Format) -> None:
    codes = np.arange(1 << fmt.bits).astype(fmt.code_dtype)
    assert same(decode(codes, fmt), widen(codes.view(ML[fmt.name]))).all()


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_every_code_decodes_as_gfloat_says(fmt: Format) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.int64)
    assert same(
        decode(codes.astype(fmt.code_dtype), fmt), decode_ndarray(GF[fmt.name], codes)
    ).all()


def test_fp32_decodes_as_numpy_says() -> None:
    values = strided_fp32()
    assert same(decode(values.view(np.uint32), FP32), widen(values)).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_code_survives_a_round_trip(fmt: Format) -> None:
    step = 1 if fmt.bits <= 16 else 8191
    codes = np.arange(0, 1 << fmt.bits, step, dtype=np.int64).astype(fmt.code_dtype)
    if fmt.specials != "none":
        codes = canonical(codes, fmt)
    for overflow in POLICIES:
        keep = codes if overflow == "ieee" else codes[~np.isinf(decode(codes, fmt))]
        assert np.array_equal(encode(decode(keep, fmt), fmt, overflow=overflow), keep)


@pytest.mark.parametrize("overflow", POLICIES)
@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_rounding_differs_from_ml_dtypes_only_as_listed(
    fmt: Format, source: str, overflow: Overflow
) -> None:
    x = np.concatenate([INPUTS[source](), around_every_boundary(fmt)])
    ours, theirs = round_to(x, fmt, overflow=overflow), widen(to_ml(x, fmt))
    nan = np.isnan(x)
    assert np.isnan(ours[nan]).all()
    if fmt.name in ML_NAN:
        assert (theirs[nan] == ML_NAN[fmt.name]).all()
    else:
        assert np.isnan(theirs[nan]).all()
    listed = np.zeros(x.shape, dtype=bool)
    if (fmt.name, overflow) in ML_DIFFERS:
        threshold, our_value, their_value = ML_DIFFERS[fmt.name, overflow]
        listed = np.abs(widen(x)) >= threshold
        assert (np.abs(ours[listed]) == our_value).all()
        assert same(np.abs(theirs[listed]), np.full(listed.sum(), their_value)).all()
        assert np.array_equal(np.signbit(ours[listed]), np.signbit(x[listed]))
        # the table must not be laxer than the truth: its threshold is met exactly
        assert threshold in np.abs(widen(x[listed]))
    assert same(ours, theirs)[~listed & ~nan].all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("overflow", POLICIES)
@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_rounding_equals_gfloat(fmt: Format, source: str, overflow: Overflow) -> None:
    x = widen(np.concatenate([INPUTS[source](), around_every_boundary(fmt)]))
    sat = overflow == "saturate"
    if (fmt.name, overflow) in GF_REFUSES:
        with pytest.raises(ValueError, match="No Infs or NaNs"):
            round_ndarray(GF[fmt.name], np.array([1e9]), RoundMode.TiesToEven, sat)
        sat = True  # and ours saturates, for want of anything else
    theirs = round_ndarray(GF[fmt.name], x, RoundMode.TiesToEven, sat)
    assert same(round_to(x, fmt, overflow=overflow), theirs).all()


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_codes_equal_ml_dtypes_and_gfloat(fmt: Format) -> None:
    x = np.concatenate([all_bf16(), around_every_boundary(fmt)])
    if fmt is E2M1:
        x = x[~np.isnan(x)]
    ours = encode(x, fmt, overflow="ieee")
    theirs = to_ml(x, fmt).view(fmt.code_dtype)
    # ml_dtypes keeps the sign of a NaN, we do not: the listed difference of the encoders
    assert np.array_equal(ours, canonical(theirs, fmt) if fmt.nan_code else theirs)
    gf = encode_ndarray(GF[fmt.name], round_to(x, fmt, overflow="ieee")).astype(fmt.code_dtype)
    assert np.array_equal(ours, canonical(gf, fmt) if fmt.nan_code else gf)


@pytest.mark.parametrize("overflow", POLICIES)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, BF16, FP16], ids=lambda f: f.name)
def test_encoding_is_rounding_followed_by_a_table_look_up(fmt: Format, overflow: Overflow) -> None:
    x = np.concatenate([strided_fp32(), around_every_boundary(fmt)])
    assert same(
        decode(encode(x, fmt, overflow=overflow), fmt), round_to(x, fmt, overflow=overflow)
    ).all()


def hard_float64(fmt: Format) -> NDArray[np.float64]:
    """float64 values that round wrongly when they pass through a wider format first."""
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << (fmt.bits - 1), size=20000)
    below = decode(bits.astype(fmt.code_dtype), fmt)
    below = below[np.isfinite(below) & (below < fmt.max)]
    quantum = np.maximum(2.0 ** np.floor(np.log2(np.maximum(below, fmt.min_normal))), 0)
    tie = below + quantum * 2.0 ** -(fmt.mantissa_bits + 1)
    near = [tie, np.nextafter(tie, np.inf), np.nextafter(tie, 0.0)]
    wild = rng.integers(0, 1 << 63, size=20000).view(np.float64)
    x = np.concatenate([*near, wild, [0.0, 5e-324, 1.7e308, np.inf, np.nan]])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("fmt", [FP32, FP16], ids=lambda f: f.name)
def test_float64_rounds_to_ieee_formats_as_numpy_does(fmt: Format) -> None:
    x = hard_float64(fmt)
    assert same(round_to(x, fmt, overflow="ieee"), widen(to_ml(x, fmt))).all()


def test_float64_rounds_to_bf16_once_and_not_through_fp32() -> None:
    x = hard_float64(BF16)
    ours = round_to(x, BF16, overflow="ieee")
    assert same(ours, round_ndarray(format_info_bfloat16, x, RoundMode.TiesToEven, False)).all()
    with np.errstate(all="ignore"):
        once = x.astype(np.float32).astype(np.float64) == x
    # where fp32 holds x, ml_dtypes has no second rounding and must agree
    assert once.sum() > 1000
    assert same(ours[once], widen(to_ml(x[once], BF16))).all()


@pytest.mark.parametrize(
    ("fmt", "x", "saturate", "ieee"),
    [
        (E4M3FN, 464.0, 448.0, 448.0),  # the tie goes to even, and that is the maximum
        (E4M3FN, 464.00003, 448.0, np.nan),
        (E4M3FN, np.inf, 448.0, np.nan),
        (E4M3FN, -np.inf, -448.0, np.nan),
        (E5M2, 61439.99, 57344.0, 57344.0),
        (E5M2, 61440.0, 57344.0, np.inf),  # this tie goes up and out
        (E5M2, -61440.0, -57344.0, -np.inf),
        (E2M1, 5.0, 4.0, 4.0),
        (E2M1, 7.0, 6.0, 6.0),
        (E2M1, -np.inf, -6.0, -6.0),
        (E4M3FN, 2.0**-10, 0.0, 0.0),  # half the smallest subnormal
        (E4M3FN, 1.5 * 2.0**-9, 2.0**-8, 2.0**-8),
        (E4M3FN, 2.5 * 2.0**-9, 2.0**-8, 2.0**-8),
        (E5M2, 2.0**-17, 0.0, 0.0),
        (E5M2, 1.0000001 * 2.0**-17, 2.0**-16, 2.0**-16),
        (E2M1, 0.25, 0.0, 0.0),
        (E2M1, 0.75, 1.0, 1.0),
        (BF16, 2.0**-134, 0.0, 0.0),
        (FP16, 65520.0, 65504.0, np.inf),
    ],
)  # fmt: skip
def test_edges_round_as_the_standard_says(
    fmt: Format, x: float, saturate: float, ieee: float
) -> None:
    for overflow, expected in (("saturate", saturate), ("ieee", ieee)):
        got = round_to(np.array([x]), fmt, overflow=overflow)  # type: ignore[arg-type]
        assert same(got, np.array([expected])).all(), (overflow, got)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_zeros_and_underflow_keep_their_sign(fmt: Format) -> None:
    tiny = fmt.min_subnormal / 4
    got = encode(np.array([0.0, -0.0, tiny, -tiny]), fmt)
    minus = 1 << (fmt.bits - 1)
    assert got.tolist() == [0, minus, 0, minus]


def test_nan_in_a_format_without_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="e2m1 has no NaN"):
        encode(np.array([1.0, np.nan]), E2M1)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, BF16, FP16, FP32], ids=lambda f: f.name)
def test_every_nan_becomes_the_canonical_code(fmt: Format) -> None:
    x = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], dtype=np.uint32)
    assert set(encode(x.view(np.float32), fmt).tolist()) == {fmt.nan_code}
    assert np.isnan(decode(np.array([fmt.nan_code], dtype=fmt.code_dtype), fmt)).all()


def test_canonical_touches_nothing_but_nans() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for fmt in (E4M3FN, E5M2):
        changed = canonical(codes, fmt) != codes
        assert np.isnan(decode(codes[changed], fmt)).all()
        assert np.isnan(decode(codes, fmt)).sum() == changed.sum() + 1


@pytest.mark.parametrize(
    ("fmt", "largest", "normal", "subnormal", "roundoff"),
    [
        (E4M3FN, 448.0, 2.0**-6, 2.0**-9, 2.0**-4),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 2.0**-3),
        (E2M1, 6.0, 1.0, 0.5, 2.0**-2),
        (BF16, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), 2.0**-126, 2.0**-133, 2.0**-8),
        (FP16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-11),
        (FP32, float(np.finfo(np.float32).max), 2.0**-126, 2.0**-149, 2.0**-24),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_derived_constants_are_the_published_ones(
    fmt: Format, largest: float, normal: float, subnormal: float, roundoff: float
) -> None:
    got = (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.unit_roundoff)
    assert got == (largest, normal, subnormal, roundoff)


def test_one_rounding_errs_by_at_most_u_over_one_plus_u_and_reaches_it() -> None:
    for fmt in (E4M3FN, E5M2, BF16):
        x = np.abs(widen(strided_fp32()))
        x = x[(x >= fmt.min_normal) & (x <= fmt.max)]
        x = np.concatenate([x, [1.0 + fmt.unit_roundoff]])  # the worst case is a tie just above 2^k
        error = np.abs(round_to(x, fmt) - x) / x
        assert error.max() == fmt.unit_roundoff / (1 + fmt.unit_roundoff)


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
def test_what_rounds_to_a_value_ends_where_the_next_value_begins(fmt: Format) -> None:
    if fmt.bits == 16:
        y = fmt.table
    else:
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 1 << 32, size=1 << 16, dtype=np.uint32)
        edges = [0, 1, 2, 3, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, 0x7F800000]
        y = decode(np.concatenate([codes, np.array(edges, dtype=np.uint32)]), fmt)
    ends = rounded_from(y, fmt)
    assert ends is not None
    nan = np.isnan(y)
    assert all(np.isnan(end[nan]).all() for end in ends)
    for end, outwards in zip(ends, (-np.inf, np.inf), strict=True):
        assert np.array_equal(round_to(end, fmt, overflow="ieee")[~nan], y[~nan])
        inner = ~nan & ~np.isinf(end)
        with np.errstate(invalid="ignore"):
            beyond = round_to(np.nextafter(end, outwards), fmt, overflow="ieee")
        assert (beyond[inner] != y[inner]).all()


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
def test_of_what_is_no_value_of_the_format_nothing_is_said(fmt: Format) -> None:
    for wrong in (1.0 + fmt.unit_roundoff, 1.5 * fmt.min_subnormal):
        assert rounded_from(np.array([1.0, wrong]), fmt) is None


def test_zero_dimensional_and_strided_arrays_round_alike() -> None:
    x = np.arange(24, dtype=np.float64).reshape(4, 6) * 1.3
    assert np.array_equal(
        round_to(x.T[::2], E4M3FN), round_to(np.ascontiguousarray(x.T[::2]), E4M3FN)
    )
    assert float(round_to(np.float64(1.06), E4M3FN)) == 1.0
    assert int(encode(np.float64(448.0), E4M3FN)) == 0x7E
    assert round_to(np.zeros((0, 3)), E4M3FN).shape == (0, 3)


# Policy differences of the E8M0 encoders, by exponent: (first, last, ours, theirs). ml_dtypes
# takes a *value*, through fp32, and E8M0 has no zero: what is 0 or Inf in fp32 becomes NaN there.
# Ours takes an exponent and clamps. Anything not listed must agree.
E8M0_DIFFERS = [(-400, -150, 0x00, 0xFF), (128, 400, 0xFE, 0xFF)]


def test_e8m0_encodes_as_ml_dtypes_says_up_to_the_listed_differences() -> None:
    exponent = np.arange(-400, 401, dtype=np.int64)
    with np.errstate(over="ignore", under="ignore"):
        theirs = np.ldexp(1.0, exponent).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    ours = encode_e8m0(exponent)
    listed = np.zeros(exponent.shape, dtype=bool)
    for first, last, our_byte, their_byte in E8M0_DIFFERS:
        here = (first <= exponent) & (exponent <= last)
        assert (ours[here] == our_byte).all() and (theirs[here] == their_byte).all()
        listed |= here
    assert np.array_equal(ours[~listed], theirs[~listed])
