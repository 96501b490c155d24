"""The reference against a scalar loop that a reader can check by eye."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from narrowfuzz.numerics import formats, reference
from narrowfuzz.numerics.formats import E2M1, E4M3FN, E5M2, Format
from narrowfuzz.numerics.plan import (
    HIGH_PRECISION,
    OPERANDS,
    ROLES,
    Fp32InverseScale,
    Fp32Scale,
    GemmPlan,
    MxScale,
    OperandPlan,
)
from narrowfuzz.numerics.scales import MxMode
from numpy.typing import NDArray

EPS = 1e-12


def tensor(fmt: Format = E4M3FN, *, pow2: bool = False) -> OperandPlan:
    return OperandPlan(fmt, "tensor", 0, Fp32Scale(EPS, pow2))


def row(fmt: Format = E4M3FN, *, pow2: bool = True) -> OperandPlan:
    return OperandPlan(fmt, "row", 0, Fp32Scale(EPS, pow2))


def block(size: int = 32, mode: MxMode = "rceil", fmt: Format = E4M3FN) -> OperandPlan:
    return OperandPlan(fmt, "block", size, MxScale(mode, 254))


PLANS = {
    "tensor": tensor(),
    "tensor e5m2": tensor(E5M2),
    "row": row(),
    "row not pow2": row(pow2=False),
    "block floor": block(mode="floor"),
    "block rceil": block(),
    "block even e5m2": block(mode="even", fmt=E5M2),
    "block of 8": block(8),
    "block fp32": OperandPlan(E4M3FN, "block", 32, Fp32Scale(EPS, False)),
    "tile": OperandPlan(E4M3FN, "tile", 4, Fp32Scale(EPS, False)),
    "tensor by reciprocal": OperandPlan(E5M2, "tensor", 0, Fp32Scale(EPS, False, "reciprocal")),
    "tile inverse": OperandPlan(E4M3FN, "tile", 4, Fp32InverseScale(EPS, False)),
    "block inverse pow2": OperandPlan(E4M3FN, "block", 32, Fp32InverseScale(EPS, True)),
}


def data(rows: int = 8, cols: int = 64, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, cols)) * 2.0 ** rng.integers(-12, 12, size=(rows, 1))
    x[1] = 0.0  # an empty granule
    x[2, :32] *= 1e-20  # amax below EPS
    x[3, 5] = -1e6  # one outlier owns its granule
    return x.astype(np.float32)


# --- the slow loop --------------------------------------------------------------------------------


def nearest(v: float, fmt: Format) -> float:
    """Nearest value of ``fmt`` by search; a tie goes to the even code, overflow to the maximum."""
    codes = range(1 << (fmt.bits - 1))
    grid = [(fmt.table[c], c) for c in codes if math.isfinite(fmt.table[c])]
    _, _, value = min((abs(g - min(abs(v), fmt.max)), c % 2, g) for g, c in grid)
    return math.copysign(value, v)


def granule_of(plan: OperandPlan, i: int, j: int) -> tuple[int, int]:
    if plan.granularity == "tensor":
        return 0, 0
    if plan.granularity == "row":
        return i, 0
    return (i // plan.block if plan.granularity == "tile" else i), j // plan.block


def slow_scale(amax: float, plan: OperandPlan) -> tuple[float, bool]:
    """(factor, multiply): the number data is multiplied or divided by."""
    assert plan.format is not None
    if isinstance(plan.scale, MxScale):
        if amax == 0:
            return 2.0**-127, False
        e = math.frexp(amax)[1] - 1
        m = amax / 2.0**e
        if plan.scale.mode == "rceil":
            e += m > plan.format.max / 2.0**plan.format.emax
        elif plan.scale.mode == "even":
            step = 2.0**plan.format.mantissa_bits
            e += math.floor(m * step + 0.5) >= 2 * step
        return 2.0 ** max(e - plan.format.emax, -127), False
    if isinstance(plan.scale, Fp32InverseScale):
        x = float(np.float32(max(amax, float(np.float32(EPS)))) / np.float32(plan.format.max))
        return (2.0 ** math.ceil(math.log2(x)) if plan.scale.power_of_two else x), False
    assert isinstance(plan.scale, Fp32Scale)
    s = float(np.float32(plan.format.max / max(amax, plan.scale.eps)))
    if plan.scale.division == "reciprocal":
        s = float(np.float32(1.0) / np.float32(amax) * np.float32(plan.format.max))
    return (2.0 ** (math.frexp(s)[1] - 1) if plan.scale.power_of_two else s), True


def slow_quantise(x: NDArray[np.float32], plan: OperandPlan) -> NDArray[np.float64]:
    assert plan.format is not None
    amax: dict[tuple[int, int], float] = {}
    for (i, j), v in np.ndenumerate(x):
        g = granule_of(plan, i, j)
        amax[g] = max(amax.get(g, 0.0), abs(float(v)))
    out = np.zeros(x.shape)
    for (i, j), v in np.ndenumerate(x):
        factor, multiply = slow_scale(amax[granule_of(plan, i, j)], plan)
        v, f = np.float32(v), np.float32(factor)
        scaled = float(v * f if multiply else v / f)
        q = nearest(scaled, plan.format)
        out[i, j] = q / factor if multiply else q * factor
    return out


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PLANS)
def test_quantise_equals_the_scalar_loop(name: str) -> None:
    x = data()
    got = reference.quantise(x, PLANS[name])
    assert got is not None
    assert np.array_equal(got.values, slow_quantise(x, PLANS[name]))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tensor", ()),
        ("row", (8, 1)),
        ("block rceil", (8, 2)),
        ("block of 8", (8, 8)),
        ("tile", (2, 16)),
    ],
)
def test_amax_and_scale_have_one_entry_a_granule(name: str, shape: tuple[int, ...]) -> None:
    got = reference.quantise(data(), PLANS[name])
    assert got is not None
    assert got.amax.shape == got.scale.shape == shape
    assert got.codes.shape == got.values.shape == (8, 64)


@pytest.mark.parametrize("name", PLANS)
def test_the_four_steps_compose_to_quantise(name: str) -> None:
    x, plan = data(), PLANS[name]
    scale = reference.scale(reference.amax(x, plan), plan)
    codes = reference.codes(x, scale, plan)
    got = reference.quantise(x, plan)
    assert got is not None
    assert np.array_equal(got.codes, codes)
    assert np.array_equal(got.values, reference.values(codes, scale, plan))


@pytest.mark.parametrize("name", PLANS)
def test_a_granule_is_the_elements_that_share_a_scale(name: str) -> None:
    """``by_granule`` against ``spread``: numbering the granules must give constant rows."""
    plan, x = PLANS[name], data()
    amax = reference.amax(x, plan)
    numbered = np.arange(amax.size).reshape(amax.shape)
    spread = np.broadcast_to(reference.broadcast_granules(numbered, plan), x.shape)
    rows = reference.by_granule(spread, plan)
    assert rows.shape[0] == amax.size and (rows == np.arange(amax.size)[:, None]).all()


def test_a_tile_needs_whole_squares() -> None:
    with pytest.raises(ValueError, match="6 rows are not a multiple of 4"):
        reference.amax(np.zeros((6, 64), dtype=np.float32), PLANS["tile"])


def test_an_unquantised_operand_has_no_quantised_form() -> None:
    assert reference.quantise(data(), HIGH_PRECISION) is None


@pytest.mark.parametrize("plan", [tensor(), row(), block()], ids=("tensor", "row", "block"))
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0)])
def test_empty_operands_quantise_to_empty_ones(plan: OperandPlan, shape: tuple[int, int]) -> None:
    got = reference.quantise(np.zeros(shape, dtype=np.float32), plan)
    assert got is not None and got.codes.shape == shape and got.values.shape == shape
    assert (got.amax == 0).all()


def test_a_contracted_axis_that_is_no_multiple_of_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="dimension 33 is not a multiple of 32"):
        reference.amax(np.zeros((2, 33), dtype=np.float32), block())


@pytest.mark.parametrize("plan", [tensor(), row(), block()], ids=("tensor", "row", "block"))
def test_nan_spoils_its_granule_and_no_other(plan: OperandPlan) -> None:
    x = np.ones((3, 64), dtype=np.float32)
    x[1, 40] = np.nan
    got = reference.quantise(x, plan)
    assert got is not None
    spoilt = np.zeros(x.shape, dtype=bool)
    if plan.granularity == "tensor":
        spoilt[:] = True
    elif plan.granularity == "row":
        spoilt[1] = True
    else:
        spoilt[1, 32:] = True
    assert np.array_equal(np.isnan(got.values), spoilt)


@pytest.mark.parametrize("plan", [tensor(E2M1), row(E2M1), block(fmt=E2M1)], ids=str)
def test_a_format_without_nan_has_meaningless_codes_under_a_nan_scale(plan: OperandPlan) -> None:
    x = np.ones((3, 64), dtype=np.float32)
    x[1, 40] = np.nan
    got = reference.quantise(x, plan)
    assert got is not None
    meaningless = np.broadcast_to(reference.meaningless(got.scale, plan), x.shape)
    assert meaningless[1, 40] and np.array_equal(np.isnan(got.values), meaningless)
    assert not reference.meaningless(np.float32(np.nan), tensor()).any()  # its code may be NaN


def test_an_infinite_amax_loses_its_row_as_documented() -> None:
    x = np.ones((2, 4), dtype=np.float32)
    x[0, 1] = np.inf
    got = reference.quantise(x, row())
    assert got is not None
    # scale 0: the Inf is Inf * 0, the rest 0 / 0
    assert got.scale[0, 0] == 0 and got.codes[0].tolist() == [0, 0x7F, 0, 0]
    assert np.array_equal(got.values[1], np.ones(4))


# --- orientation ----------------------------------------------------------------------------------


def test_operands_are_oriented_so_that_a_times_b_transposed_is_each_gemm() -> None:
    rng = np.random.default_rng(3)
    x, w, g = rng.normal(size=(5, 7)), rng.normal(size=(3, 7)), rng.normal(size=(5, 3))
    tensors = {"input": x, "weight": w, "grad_output": g}
    expected = {"output": x @ w.T, "grad_input": g @ w, "grad_weight": g.T @ x}
    assert set(expected) == set(ROLES) == set(OPERANDS)
    for role in ROLES:
        a, b = reference.canonical_operands(role, tensors)
        np.testing.assert_allclose(reference.product(a, b), expected[role], rtol=1e-14)


@pytest.mark.parametrize(
    ("role", "a", "b"),
    [
        ("output", (5, 7), (3, 7)),
        ("grad_input", (5, 3), (7, 3)),
        ("grad_weight", (3, 5), (7, 5)),
    ],
)
def test_the_contracted_axis_is_last_in_both_operands(
    role: str, a: tuple[int, int], b: tuple[int, int]
) -> None:
    tensors = {
        "input": np.zeros((5, 7)),
        "weight": np.zeros((3, 7)),
        "grad_output": np.zeros((5, 3)),
    }
    got = reference.canonical_operands(role, tensors)  # type: ignore[arg-type]
    assert (got[0].shape, got[1].shape) == (a, b)


def test_an_inf_that_meets_a_zero_comes_out_as_nan() -> None:
    a, b = np.array([[np.inf, 1.0]]), np.array([[0.0, 1.0], [1.0, 1.0]])
    got = reference.product(a, b)
    assert np.isnan(got[0, 0]) and got[0, 1] == np.inf


# --- as-built deviations --------------------------------------------------------------------------


def granule_with_byte_zero() -> NDArray[np.float32]:
    x = data()
    x[0, :32] = np.float32(2.0**-124) * np.linspace(-1, 1, 32, dtype=np.float32)
    return x


@pytest.mark.parametrize("deviation", sorted(reference.DEVIATIONS))
@pytest.mark.parametrize("name", PLANS)
def test_a_deviation_changes_codes_only_under_mx_byte_zero(name: str, deviation: str) -> None:
    x, plan = granule_with_byte_zero(), PLANS[name]
    scale = reference.scale(reference.amax(x, plan), plan)
    usual = reference.codes(x, scale, plan)
    built = reference.codes(x, scale, plan, deviation=deviation)
    changed = usual != built
    if not (deviation.startswith("mx_byte0") and isinstance(plan.scale, MxScale)):
        assert not changed.any()
        return
    byte = reference.broadcast_granules(scale, plan)
    assert (byte[changed] == 0).all() and changed.any()


def test_byte0_times_one_flushes_and_byte0_min_normal_halves() -> None:
    x = np.full((1, 32), 2.0**-120, dtype=np.float32)
    plan = block()
    byte = np.zeros((1, 1), dtype=np.uint8)
    for deviation, factor in (("", 1.0), ("mx_byte0_times_one", 0.0), ("mx_byte0_min_normal", 0.5)):
        codes = reference.codes(x, byte, plan, deviation=deviation)
        assert (reference.values(codes, byte, plan) == factor * x).all(), deviation


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_scales_that_torch_code_divides_are_known_to_the_bit(fmt: Format) -> None:
    amax = np.exp(np.random.default_rng(0).normal(size=5000) * 4).astype(np.float32)
    of = torch.from_numpy(amax)
    quotient, reciprocal = Fp32Scale(EPS, False), Fp32Scale(EPS, False, "reciprocal")
    assert (reciprocal.of(amax, fmt) == (fmt.max / of).numpy()).all()
    assert (quotient.of(amax, fmt) == (torch.tensor(fmt.max) / of).numpy()).all()
    assert (quotient.of(amax, fmt) != reciprocal.of(amax, fmt)).any()
    inverse = Fp32InverseScale(EPS, False).of(amax, fmt)
    assert (inverse == (of / fmt.max).numpy()).all()
    assert (inverse != np.float32(1.0) / quotient.of(amax, fmt)).any()
    above = Fp32InverseScale(EPS, True).of(amax, fmt)
    assert (np.frexp(above)[0] == 0.5).all() and (above >= inverse).all()
    assert (above < 2 * inverse).all()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("amax", [0.0, 1e-45, np.inf, np.nan])
def test_inverse_scales_of_special_amaxes_are_those_of_torch(fmt: Format, amax: float) -> None:
    x = np.float32([[amax, 1.0 if np.isinf(amax) else amax]])
    of = torch.from_numpy(x)
    for eps in (0.0, EPS):
        plan = OperandPlan(fmt, "row", 0, Fp32InverseScale(eps, False))
        scale = of.abs().amax(1, keepdim=True).clamp(min=eps) / fmt.max
        made = reference.quantise(x, plan)
        np.testing.assert_array_equal(made.scale, scale.numpy())
        if not (eps == 0.0 < amax < 1.0):  # it is 0 there, and torch's cast of x / 0 saturates
            codes = (of / scale).to(getattr(torch, f"float8_{fmt.name}"))
            np.testing.assert_array_equal(formats.decode(made.codes, fmt), codes.float().numpy())
        assert not reference.meaningless(made.scale, plan).any(), "a NaN scale makes NaN codes"


@pytest.mark.parametrize("name", PLANS)
def test_only_power_of_two_scales_have_a_second_allowed_value(name: str) -> None:
    plan = PLANS[name]
    # 448 / 2^-k just above 1: the raw scale lies one ulp under a power of two
    amax = np.float32([[448.0 * (1 + 2.0**-23)], [3.0], [448.0 / 64 * (1 + 2.0**-22)]])
    other = reference.scale_as_built(amax, plan, "pow2_floor_by_log2")
    pow2 = isinstance(plan.scale, Fp32Scale) and plan.scale.power_of_two
    assert (other is not None) == pow2
    if other is not None:
        assert other[1, 0] == reference.scale(amax, plan)[1, 0]  # mid-binade: no say
        assert other[2, 0] == 2 * reference.scale(amax, plan)[2, 0] == 64.0
    for deviation in ("mx_byte0_times_one", "mx_byte0_min_normal", ""):
        assert reference.scale_as_built(amax, plan, deviation) is None


# --- entering the multiply ------------------------------------------------------------------------


def test_values_are_rounded_to_what_the_plan_dequantises_to() -> None:
    values = np.array([1 / 3, 3.4e38, 3.5e38, 1e300])
    kept = GemmPlan(row(), row(), scale_roundings=0)
    fp32 = GemmPlan(row(), row(), scale_roundings=0, dequantise_to="fp32")
    dtype = GemmPlan(row(), row(), scale_roundings=0, dequantise_to="dtype")
    assert reference.multiplied(values, kept, "bf16") is values
    with np.errstate(over="ignore"):
        assert np.array_equal(reference.multiplied(values, fp32, "bf16"), values.astype(np.float32))
    # bf16's maximum is 3.3895e38, and 3.4e38 lies past the tie above it
    assert reference.multiplied(values, dtype, "bf16").tolist() == [
        0.333984375,
        np.inf,
        np.inf,
        np.inf,
    ]
    assert reference.multiplied(values, dtype, "fp32")[1] == np.float32(3.4e38)
