"""Scale rules against integer and rational arithmetic, which has no rounding to get wrong."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from narrowfuzz.numerics.formats import BF16, E2M1, E4M3FN, E5M2, Format
from narrowfuzz.numerics.scales import (
    MxMode,
    max_over_amax,
    mx_exponent,
    mx_factor,
    mx_rceil_by_log2,
    mx_scale,
    pow2_floor,
    pow2_floor_by_log2,
)
from numpy.typing import NDArray

EPS = 1e-12
MODES: tuple[MxMode, ...] = ("floor", "rceil", "ceil", "even")
NORMAL_EXPONENTS = range(-126, 128)


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def fp32_bits(exponent: int, mantissa: int) -> NDArray[np.float32]:
    """The positive normal fp32 with this exponent and 23-bit mantissa."""
    return np.array([((exponent + 127) << 23) | mantissa], dtype=np.uint32).view(np.float32)


# --- max_over_amax --------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
def test_max_over_amax_is_a_float64_quotient_rounded_once(fmt: Format) -> None:
    bits = np.arange(0x2B8CBCCD, 0x7F800000, 65537, dtype=np.int64).astype(np.uint32)
    amax = bits.view(np.float32)
    expected = [np.float32(float(fmt.max) / float(a)) for a in amax]
    assert np.array_equal(max_over_amax(amax, fmt, eps=EPS), np.array(expected, dtype=np.float32))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
def test_below_eps_the_scale_stops_growing(fmt: Format) -> None:
    ceiling = np.float32(fmt.max / EPS)
    small = f32(0.0, 1e-45, 1e-38, 1e-20, 0.99e-12)
    assert (max_over_amax(small, fmt, eps=EPS) == ceiling).all()
    # 1e-12 is no fp32 number: the floats on its two sides fall on two sides of the clamp
    below, above = np.nextafter(np.float32(EPS), np.float32(0)), np.float32(2e-12)
    assert max_over_amax(f32(below), fmt, eps=EPS)[0] == ceiling
    assert max_over_amax(f32(above), fmt, eps=EPS)[0] < ceiling


def test_an_infinite_amax_gives_scale_zero_and_nan_gives_nan() -> None:
    inf, nan = max_over_amax(f32(np.inf, np.nan), E4M3FN, eps=EPS)
    assert inf == 0.0 and not np.signbit(inf)
    assert np.isnan(nan)


def test_without_eps_a_zero_amax_gives_inf() -> None:
    assert max_over_amax(f32(0.0), E4M3FN, eps=0.0)[0] == np.inf


# --- powers of two --------------------------------------------------------------------------------


@pytest.mark.parametrize("ulps", [0, 1, 2, 1 << 22, (1 << 23) - 1])
def test_pow2_floor_is_the_exponent_field_for_every_exponent(ulps: int) -> None:
    for exponent in NORMAL_EXPONENTS:
        assert pow2_floor(fp32_bits(exponent, ulps))[0] == 2.0**exponent


def test_pow2_floor_one_ulp_under_a_power_gives_the_one_below() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-125, 128)).astype(np.float32)
    under = np.nextafter(powers, np.float32(0))
    assert np.array_equal(pow2_floor(under), powers / 2)


def test_pow2_floor_of_subnormals_is_their_leading_bit() -> None:
    bits = np.concatenate([np.arange(1, 5000), np.arange(5000, 1 << 23, 997)]).astype(np.uint32)
    expected = [2.0 ** (int(b).bit_length() - 1 - 149) for b in bits]
    assert np.array_equal(pow2_floor(bits.view(np.float32)), np.array(expected, dtype=np.float32))


def test_pow2_floor_keeps_zero_inf_and_nan() -> None:
    zero, inf, nan = pow2_floor(f32(0.0, np.inf, np.nan))
    assert zero == 0 and inf == np.inf and np.isnan(nan)


def ulps_under(exponent: int, count: int) -> NDArray[np.float32]:
    """The ``count`` floats below 2^exponent, nearest first."""
    top = int(fp32_bits(exponent, 0).view(np.uint32)[0])
    return (
        np.arange(top - 1, top - 1 - count, -1, dtype=np.int64).astype(np.uint32).view(np.float32)
    )


@pytest.mark.parametrize("exponent", list(range(-125, 128)))
def test_by_log2_flags_exactly_a_run_of_values_under_each_power(exponent: int) -> None:
    s = ulps_under(exponent, 256)
    flagged = pow2_floor_by_log2(s)
    assert set(flagged.tolist()) <= {0.0, 2.0**exponent}
    run = int((flagged > 0).sum())
    assert (flagged[:run] > 0).all() and (flagged[run:] == 0).all()
    # Independent of any log2: k ulps under 2^e, log2 falls short of e by k * 2^-24 / ln 2 (to first
    # order); it rounds to e where that is below half the spacing of fp32 just under |e|.
    if exponent > 0:
        # spacing below e, towards zero; an exact power of two has the finer binade below it
        spacing = 2.0 ** (int(exponent - 1).bit_length() - 1 - 23) if exponent > 1 else 2.0**-24
    elif exponent < 0:
        spacing = 2.0 ** (int(-exponent).bit_length() - 1 - 23)  # away from zero
    else:
        spacing = 0.0  # log2 is small itself: nothing is lost, nothing may be flagged
    shortfall = np.arange(1, 257) * 2.0**-24 / np.log(2.0)
    assert (flagged[shortfall < 0.49 * spacing] > 0).all()  # certainly rounds to e
    assert (flagged[shortfall > 1.51 * spacing] == 0).all()  # not even one ulp of slack reaches e


def test_by_log2_never_flags_a_power_of_two_or_anything_in_mid_binade() -> None:
    for exponent in NORMAL_EXPONENTS:
        s = np.concatenate([fp32_bits(exponent, m) for m in (0, 1, 1 << 22, (1 << 23) - 512)])
        assert (pow2_floor_by_log2(s) == 0).all()


def test_by_log2_has_nothing_to_say_about_zero_inf_and_nan() -> None:
    assert (pow2_floor_by_log2(f32(0.0, np.inf, np.nan)) == 0).all()


def test_torch_log2_flooring_is_always_one_of_the_two_allowed_scales() -> None:
    torch = pytest.importorskip("torch")
    near = [ulps_under(e, 64) for e in range(-125, 128)]
    exact = [fp32_bits(e, m) for e in NORMAL_EXPONENTS for m in (0, 1, 12345, 1 << 22)]
    s = np.concatenate([*near, *exact])
    got = torch.exp2(torch.floor(torch.log2(torch.from_numpy(s)))).numpy()
    right, other = pow2_floor(s), pow2_floor_by_log2(s)
    assert ((got == right) | (got == other)).all()
    assert (got != right).sum() > 250  # the deviation exists: the switch is not idle


# --- MX exponents ---------------------------------------------------------------------------------


def exponent_by_fractions(amax: np.float32, fmt: Format, mode: MxMode) -> int:
    """The rule's defining sentence, in rationals and integers only."""
    a = Fraction(float(amax))
    e = a.numerator.bit_length() - a.denominator.bit_length()
    if Fraction(2) ** e > a:
        e -= 1
    assert Fraction(2) ** e <= a < Fraction(2) ** (e + 1)
    if mode == "floor":
        return e - fmt.emax
    if mode == "ceil":
        return (e if Fraction(2) ** e == a else e + 1) - fmt.emax
    if mode == "rceil":
        scale = e - fmt.emax - 2
        while a / Fraction(2) ** scale > Fraction(fmt.max):
            scale += 1
        return scale
    units = a / Fraction(2) ** e * 2**fmt.mantissa_bits
    rounded = (units + Fraction(1, 2)).__floor__()  # half up, as torchao adds half and truncates
    return e + (rounded >= 2 ** (fmt.mantissa_bits + 1)) - fmt.emax


# mantissas at, and one ulp either side of, every place where one of the rules flips
MANTISSAS = sorted(
    {
        m % (1 << 23)
        for at in (0x000000, 0x600000, 0x400000, 0x700000, 0x780000, 0x500000, 0x200000, 0x7FFFFF)
        for m in (at - 1, at, at + 1)
    }
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1], ids=lambda f: f.name)
def test_mx_exponent_obeys_its_rule_at_every_exponent(fmt: Format, mode: MxMode) -> None:
    exponents = range(-126, 128, 1)
    amax = np.concatenate([fp32_bits(e, m) for e in exponents for m in MANTISSAS])
    # one exponent through Fractions for each mantissa would do in theory; all of them cost 0.2 s
    expected = [exponent_by_fractions(a, fmt, mode) for a in amax]
    assert mx_exponent(amax, fmt, mode).tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_mx_exponent_of_subnormal_amax_is_exact(mode: MxMode) -> None:
    bits = np.array([1, 2, 3, 5, 6, 7, 8, 15, 0x100, 0x1C0, 0x1C1, 0x600000, 0x7FFFFF], np.uint32)
    amax = bits.view(np.float32)
    expected = [exponent_by_fractions(a, E4M3FN, mode) for a in amax]
    assert mx_exponent(amax, E4M3FN, mode).tolist() == expected


def test_rceil_flips_between_1_75_and_its_successor() -> None:
    below, at, above = fp32_bits(0, 0x5FFFFF), fp32_bits(0, 0x600000), fp32_bits(0, 0x600001)
    got = mx_exponent(np.concatenate([below, at, above]), E4M3FN, "rceil")
    assert got.tolist() == [-8, -8, -7]


def test_modes_other_than_floor_and_even_never_saturate() -> None:
    amax = np.concatenate([fp32_bits(0, m) for m in range(0, 1 << 23, 4093)]).astype(np.float64)
    ratio = {m: amax * 2.0 ** -mx_exponent(amax.astype(np.float32), E4M3FN, m) for m in MODES}
    assert ratio["rceil"].min() > 224 and ratio["rceil"].max() <= 448
    assert ratio["ceil"].min() > 128 and ratio["ceil"].max() <= 256
    assert ratio["floor"].min() >= 256 and 448 < ratio["floor"].max() < 512
    assert 448 < ratio["even"].max() < 496


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'round'.*floor, rceil, ceil or even"):
        mx_exponent(f32(1.0), E4M3FN, "round")  # type: ignore[arg-type]


# --- MX bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inf_byte", [247, 254, 255])
def test_special_amax_values_have_their_own_bytes(mode: MxMode, inf_byte: int) -> None:
    got = mx_scale(f32(0.0, -0.0, np.inf, np.nan, 1.0), E4M3FN, mode, inf_byte=inf_byte)
    assert got.dtype == np.uint8
    assert got.tolist() == [0, 0, inf_byte, 255, 119]


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_clamped_exponents(mode: MxMode) -> None:
    subnormal = np.array([1, 3, 0x400000], dtype=np.uint32).view(np.float32)
    amax = np.concatenate([subnormal, *(fp32_bits(e, 0x600001) for e in NORMAL_EXPONENTS)])
    exponent = [exponent_by_fractions(a, E4M3FN, mode) for a in amax]
    expected = [min(max(e, -127), 127) + 127 for e in exponent]
    assert mx_scale(amax, E4M3FN, mode, inf_byte=254).tolist() == expected


def test_the_byte_only_reaches_254_where_elements_are_narrow() -> None:
    # bf16 as element has emax 127: its scales sit at the low end, a sanity check of the clamp
    largest = f32(np.finfo(np.float32).max)
    assert mx_scale(largest, E4M3FN, "floor", inf_byte=0).tolist() == [127 + 127 - 8]
    assert mx_scale(largest, BF16, "floor", inf_byte=0).tolist() == [127]


def test_mx_factor_is_exact_for_every_byte() -> None:
    got = mx_factor(np.arange(256, dtype=np.uint8))
    assert got[0] == 2.0**-127  # not zero, and a subnormal in fp32
    assert all(Fraction(float(got[b])) == Fraction(2) ** (b - 127) for b in range(255))
    assert np.isnan(got[255])


@pytest.mark.filterwarnings("error")
def test_by_log2_a_quotient_that_underflows_has_byte_zero() -> None:
    amax = np.array([1e-45, 1e-40, 2.0**-119], dtype=np.float32)
    assert mx_rceil_by_log2(amax, E4M3FN).tolist() == [0, 0, 0]
