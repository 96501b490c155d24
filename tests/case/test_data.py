"""Tensors: reproducible to the bit, stable under shrinking, and what their class promises."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowfuzz.case.data import hash_bits, lattice_format, make_tensors
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike
from narrowfuzz.draw.strategies import WILD
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import E4M3FN, E5M2, F32, FORMATS
from narrowfuzz.numerics.plan import ROLES, Fp32Scale, Plan
from narrowfuzz.numerics.scales import mx_scale
from numpy.typing import NDArray
from samples import recipes

EXAMPLES = settings(max_examples=60, deadline=None, database=None, derandomize=True)
RECIPES = recipes()
BF16 = ml_dtypes.bfloat16
TENSORWISE = "torchao.float8.tensorwise"


def plan_of(spec: Spec) -> Plan:
    return RECIPES[spec.recipe].plan(spec)


def tensors(spec: dict[str, Any] | None = None, **data: Any) -> dict[str, F32]:
    full = Spec(**{"recipe": TENSORWISE, "dtype": "fp32", **(spec or {})})
    return make_tensors(Case(spec=full, data=DataSpec(**data)), plan_of(full))


def wild(values: str, *, m: int = 128, dtype: str = "fp32", **data: Any) -> F32:
    """A [m, 96] input of one value class."""
    return tensors({"m": m, "k": 96, "dtype": dtype}, values=values, **data)["input"]


def hexes(x: NDArray[np.float32]) -> list[str]:
    return [f"{b:08x}" for b in np.ascontiguousarray(x).view(np.uint32).ravel().tolist()]


# --- reproducible ---------------------------------------------------------------------------------


def test_hash_bits_are_pinned() -> None:
    assert [f"{b:016x}" for b in hash_bits(0, "input", 1, 2)[0].tolist()] == PINNED_HASH


PINNED_HASH = ["f24c4ff21a1d7b2f", "af746c6faed8d0af"]
PINNED = {
    "gaussian": ["3f5f9c9f", "3e8c0dab", "3f25c1c5"],
    "outlier": ["3f5f9c9f", "3e8c0dab", "3f25c1c5"],
    "heavy_tail": ["40df9c9f", "418c0dab", "38a5c1c5"],
    "zero_rows": ["3f5f9c9f", "3e8c0dab", "3f25c1c5"],
    "binade_edges": ["40400000", "40600001", "bc27ffff"],
    "near_max": ["7d6fce50", "7ea3036b", "7d52e0e2"],
    "subnormal": ["03df9c9f", "038c0dab", "03a5c1c5"],
    "lattice": ["3f800000", "c1200000", "c0a00000"],
}


@pytest.mark.parametrize("values", sorted(PINNED))
def test_the_first_values_of_every_class_are_pinned(values: str) -> None:
    # cases are exchanged between machines: the same case must make the same bits for ever
    regime = "lattice" if values == "lattice" else "wild"
    kind = "gaussian" if values == "lattice" else values
    x = tensors({"m": 40, "k": 40}, regime=regime, values=kind, seed=7)
    assert hexes(x["input"][3, 6:9]) == PINNED[values]


@pytest.mark.parametrize("values", WILD)
def test_equal_cases_make_equal_tensors(values: str) -> None:
    first, second = (tensors({"bias": True}, values=values, seed=3) for _ in range(2))
    assert first.keys() == second.keys() == {"input", "weight", "grad_output", "bias"}
    assert all(hexes(first[name]) == hexes(second[name]) for name in first)


def test_tensors_and_seeds_are_independent() -> None:
    x = tensors({"m": 32, "k": 32, "n": 32}, seed=1)
    y = tensors({"m": 32, "k": 32, "n": 32}, seed=2)
    seen = [x["input"], x["weight"] * 4, x["grad_output"], y["input"], x["input"].T]
    for i, a in enumerate(seen):
        for b in seen[i + 1 :]:
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.15


def test_thegaussian_has_zero_mean_unit_variance_and_light_tails() -> None:
    x = wild("gaussian", m=512).astype(np.float64)
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02 and 3 < np.abs(x).max() < 3.5


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("regime", ["wild", "lattice"])
def test_shapes_are_those_of_the_spec(recipe: str, regime: str) -> None:
    spec = Spec(recipe=recipe, m=3, k=5, n=7, batch=2, bias=True, dtype=RECIPES[recipe].dtypes[0])
    got = make_tensors(Case(spec=spec, data=DataSpec(regime=regime)), plan_of(spec))
    shapes = {name: t.shape for name, t in got.items()}
    assert shapes == {"input": (6, 5), "weight": (7, 5), "grad_output": (6, 7), "bias": (7,)}
    assert all(t.dtype == np.float32 for t in got.values())


@pytest.mark.parametrize("values", WILD)
@pytest.mark.parametrize("dims", [(0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_and_single_dimensions_are_fine(values: str, dims: tuple[int, int, int]) -> None:
    m, k, n = dims
    for regime in ("wild", "lattice"):
        spike = (Spike("input", 5, 5, "0x7f800000"), Spike("bias", 0, 0, "0x7f800000"))
        for grad in ("contiguous", "expanded"):
            shape = {"m": m, "k": k, "n": n, "bias": True, "grad_layout": grad}
            got = tensors(shape, values=values, regime=regime, spikes=spike)
            assert got["input"].shape == (m, k) and got["grad_output"].shape == (m, n)


# --- shrinking ------------------------------------------------------------------------------------

SMALLER = st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 70))


def assert_corners(dims: tuple[int, int, int], dtype: str, **data: Any) -> None:
    """Tensors of these dimensions are the corners of larger ones."""
    large, small = (
        tensors({"m": m, "k": k, "n": n, "bias": True, "dtype": dtype}, **data)
        for m, k, n in ((70, 70, 70), dims)
    )
    for name, x in small.items():
        corner = large[name][tuple(slice(size) for size in x.shape)]
        assert hexes(x) == hexes(corner), name


@EXAMPLES
@given(st.sampled_from(WILD), SMALLER, st.integers(0, 2**32 - 1), st.booleans())
def test_wild_elements_keep_their_value_when_dimensions_shrink(
    values: str, dims: tuple[int, int, int], seed: int, bf16: bool
) -> None:
    assert_corners(dims, "bf16" if bf16 else "fp32", values=values, seed=seed)


@EXAMPLES
@given(SMALLER, st.integers(0, 2**32 - 1))
def test_lattice_elements_keep_their_value_when_dimensions_shrink(
    dims: tuple[int, int, int], seed: int
) -> None:
    m, k, n = (max(32, dim) for dim in dims)  # below 32 the pins move: fewer diagonals are left
    assert_corners((m, k, n), "fp32", regime="lattice", seed=seed)


# --- value classes --------------------------------------------------------------------------------


def test_outliers_are_rare_and_three_orders_larger() -> None:
    x = np.abs(wild("outlier", m=512))
    share = float((x > 16).mean())
    assert 0.01 < share < 0.03 and x.max() > 4096


def test_heavy_tails_span_thirty_binades() -> None:
    x = np.abs(wild("heavy_tail"))
    x = x[x > 0]
    assert x.max() / np.median(x) > 2.0**12 and np.median(x) / x.min() > 2.0**12


@pytest.mark.parametrize("seed", range(12))
def test_zero_rows_has_empty_rows_and_columns_and_others(seed: int) -> None:
    got = tensors({"m": 32, "k": 48, "n": 40}, values="zero_rows", seed=seed)
    for x in got.values():
        for axis in (0, 1):
            empty = (x == 0).all(axis=axis)
            assert empty.any() and not empty.all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_binade_edges_hit_1_75_and_powers_of_two_and_their_neighbours(dtype: str) -> None:
    x = np.abs(wild("binade_edges", dtype=dtype))
    significand = 2 * np.frexp(x)[0]
    ulp = 2.0**-7 if dtype == "bf16" else 2.0**-23
    for anchor in (1.75, 1.5, 1.875):
        for step in (-1, 0, 1):
            assert (significand == anchor + step * ulp).any(), (anchor, step)
    assert (significand == 1.0).any() and (significand == 1.0 + ulp).any()
    assert (significand == 2.0 - 2 * ulp).any() or (significand == 2.0 - ulp).any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_step_under_a_power_of_two_is_the_very_next_number(dtype: str) -> None:
    # scale rules flip between 2^k and its predecessor, which is half an ulp of 2^k away
    x = np.abs(wild("binade_edges", dtype=dtype))
    ulp = 2.0**-7 if dtype == "bf16" else 2.0**-23
    assert (2 * np.frexp(x)[0] == 2.0 - ulp).any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_mined_values_are_the_maxima_of_rows_columns_and_blocks(dtype: str) -> None:
    x = np.abs(wild("mined", dtype=dtype))
    spacing = 2.0 ** -FORMATS[dtype].mantissa_bits
    blocks = x[: len(x) // 32 * 32, : x.shape[1] // 32 * 32].reshape(-1, 32)
    for granules in (x, x.T, blocks):
        significand = 2 * np.frexp(granules.max(axis=1))[0].astype(np.float64)
        near = np.array([1.0, 2.0, 1.5, 1.75, 1.875, 1.625, 1.8125, 1.0625])
        assert (np.abs(significand[:, None] - near).min(axis=1) <= spacing).all()
    assert (np.signbit(wild("mined", dtype=dtype)) & (x == 0)).any()


def test_scale_ends_reach_the_first_and_the_last_bytes() -> None:
    x = np.abs(wild("scale_ends", dtype="fp32"))
    bytes_ = mx_scale(x.max(axis=1), FORMATS["e4m3fn"], "floor", inf_byte=254)
    assert np.isfinite(x).all() and {0, 1} <= set(bytes_.tolist()) and bytes_.max() >= 244


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(5))
def test_near_max_is_finite_and_above_2_to_the_120(dtype: str, seed: int) -> None:
    x = np.abs(wild("near_max", dtype=dtype, seed=seed))
    assert np.isfinite(x).all() and (x >= 2.0**120).all() and x.max() > 2.0**127


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_subnormal_reaches_below_eps_and_into_fp32_subnormals(dtype: str) -> None:
    x = np.abs(wild("subnormal", dtype=dtype))
    row_max = x.max(axis=1)
    assert (row_max < 1e-12).any(), "no granule has its amax below torchao's EPS"
    assert ((row_max > 0) & (row_max < 2.0**-126)).any(), "no granule is subnormal throughout"
    assert (row_max > 1e-12).any(), "nothing on the other side of EPS"


def test_the_ends_of_fp16_are_its_own() -> None:
    largest = np.abs(wild("near_max", dtype="fp16"))
    assert (largest >= 256.0).all() and largest.max() == 65504.0
    assert len(np.unique(np.frexp(largest)[1])) == 8, "saturated throughout"
    rows = np.abs(wild("subnormal", dtype="fp16")).max(axis=1)
    assert ((rows > 0) & (rows < 2.0**-14)).any() and (rows > 2.0**-12).any()
    ends = np.abs(wild("scale_ends", dtype="fp16"))
    assert ends.max() > 2.0**15 and (ends.max(axis=1) < 2.0**-14).any()


def test_an_unknown_value_class_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="unknown value class 'gausian': known are gaussian, "):
        wild("gausian")


@pytest.mark.parametrize(
    ("dtype", "of_numpy", "spec", "exponent"),
    [("fp16", np.float16, {}, 0), ("bf16", BF16, {"m": 64, "k": 64, "n": 64}, -9)],
    ids=["fp16", "bf16"],
)
@pytest.mark.parametrize("values", [*WILD, "lattice"])
def test_tensors_hold_values_of_their_dtype_only(
    values: str, dtype: str, of_numpy: Any, spec: dict[str, int], exponent: int
) -> None:
    regime, kind = ("lattice", "gaussian") if values == "lattice" else ("wild", values)
    spikes = (Spike("input", 1, 1, "0x43e00001"), Spike("weight", 2, 2, "0x7f7fffff"))
    data = {"regime": regime, "values": kind, "input_exponent": exponent, "spikes": spikes}
    for name, x in tensors({**spec, "bias": True, "dtype": dtype}, **data).items():
        assert np.array_equal(x.astype(of_numpy).astype(np.float32), x), name


@pytest.mark.parametrize("name", ["input", "weight", "grad"])
def test_an_exponent_scales_its_own_tensor_exactly(name: str) -> None:
    plain, scaled = tensors(seed=1), tensors(seed=1, **{f"{name}_exponent": -7})
    for key, x in plain.items():
        factor = 2.0**-7 if key.startswith(name) else 1.0
        assert np.array_equal(scaled[key], x * np.float32(factor)), key


# --- lattice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(64, 96), (48, 40), (33, 70), (1, 64), (64, 1), (5, 200), (1, 1)]
)
@pytest.mark.parametrize("name", ["input", "grad_output"])
def test_every_row_column_and_block_of_a_lattice_has_a_pinned_maximum(
    name: str, shape: tuple[int, int]
) -> None:
    rows, cols = shape
    spec = {"m": rows, "k": cols, "n": cols}
    x = np.abs(tensors(spec, regime="lattice", seed=11)[name])
    largest = 14.0  # 14 * 1 on the E4M3 grid, 7 * 2 on the E5M2 grid
    assert x.max() == largest
    assert (x.max(axis=0) == largest).all() and (x.max(axis=1) == largest).all()
    for j in range(0, cols - 31, 32):
        assert rows < 32 or (x[:, j : j + 32].max(axis=1) == largest).all(), j
    for i in range(0, rows - 31, 32):
        assert cols < 32 or (x[i : i + 32].max(axis=0) == largest).all(), i


def test_narrow_lattices_have_their_blocks_pinned_too() -> None:
    # fewer than 32 rows: the pins come closer together, so each 32-block still has one
    x = np.abs(tensors({"m": 7, "k": 96}, regime="lattice")["input"])
    for j in range(0, 96, 32):
        assert (x[:, j : j + 32].max(axis=1) == 14).all()


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_lattice_values_lie_on_the_grid_of_their_format(recipe: str) -> None:
    dtype = RECIPES[recipe].dtypes[0]
    spec = Spec(recipe=recipe, m=64, k=64, n=64, dtype=dtype)
    plan = plan_of(spec)
    got = make_tensors(Case(spec=spec, data=DataSpec(regime="lattice")), plan)
    for name, x in got.items():
        # the maximum is 448 or 57344 times a power of two, everything a multiple of its unit
        unit = {E4M3FN: 1.0, E5M2: 2.0}[lattice_format(name, plan)]
        assert np.array_equal(np.round(x / unit) * unit, x), name
        assert len(np.unique(np.abs(x))) == 14 / unit + 1, name


def test_gradients_of_the_hybrid_recipe_use_the_e5m2_grid_and_all_else_e4m3() -> None:
    plan = plan_of(Spec(recipe=TENSORWISE))
    assert lattice_format("grad_output", plan) is E5M2
    assert lattice_format("input", plan) is lattice_format("weight", plan) is E4M3FN


# E2M1 has eight magnitudes and its tensor scale no powers of two: NVFP4 has no lattice, and O7 says
# not applicable there
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"torchao.nvfp4"}))
@pytest.mark.parametrize("grad_layout", ["contiguous", "expanded"])
def test_lattice_operands_quantise_without_any_error(recipe: str, grad_layout: str) -> None:
    unit = max(32, RECIPES[recipe].alignment)
    for backend in RECIPES[recipe].backends:
        spec = Spec(
            recipe=recipe, backend=backend, m=3 * unit, k=2 * unit, n=unit,
            dtype=RECIPES[recipe].dtypes[0],
            grad_layout=grad_layout,  # type: ignore[arg-type]
        )  # fmt: skip
        plan = plan_of(spec)
        data = DataSpec(regime="lattice", seed=5, input_exponent=-3, grad_exponent=7)
        got = make_tensors(Case(spec=spec, data=data), plan)
        for role in ROLES:
            operands = reference.canonical_operands(role, got)
            for x, operand in zip(operands, (plan.gemms[role].a, plan.gemms[role].b), strict=True):
                q = reference.quantise(x, operand)
                # an expanded gradient has constant columns, whose amax no pin reaches: only
                # power-of-two scales make them exact
                scale = operand.scale
                own = isinstance(scale, Fp32Scale) and operand.granularity != "tensor"
                if grad_layout == "expanded" and own and not scale.power_of_two:
                    continue
                assert q is None or np.array_equal(q.values, x), role


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_lattice_sums_stay_below_two_to_the_24_units(recipe: str) -> None:
    # the longest contraction a campaign draws: three batch entries of 159 rows
    spec = Spec(recipe=recipe, m=159, batch=3, k=159, n=159, dtype=RECIPES[recipe].dtypes[0])
    plan = plan_of(spec)
    got = make_tensors(Case(spec=spec, data=DataSpec(regime="lattice")), plan)
    for role in ROLES:
        a, b = (np.abs(x.astype(np.float64)) for x in reference.canonical_operands(role, got))
        units = {n: 2.0 if lattice_format(n, plan) is E5M2 else 1.0 for n in got}
        unit = units["grad_output"] if role != "output" else 1.0
        assert (a @ b.T).max() / unit < 2.0**24


def test_a_lattice_bias_is_an_integer_on_the_same_scale_as_the_product() -> None:
    got = tensors({"n": 64, "bias": True}, regime="lattice", input_exponent=-3, weight_exponent=1)
    units = got["bias"] * 4.0
    assert np.array_equal(np.round(units), units) and np.abs(units).max() <= 64


# --- spikes and the expanded gradient -------------------------------------------------------------


def test_spikes_wrap_around_and_touch_nothing_else() -> None:
    plain = tensors({"m": 32, "k": 40})["input"]
    spiked = tensors({"m": 32, "k": 40}, spikes=(Spike("input", 33, 85, "0x43e00000"),))["input"]
    changed = np.argwhere(plain != spiked)
    assert changed.tolist() == [[1, 5]] and spiked[1, 5] == 448.0


def test_a_bias_spike_wraps_by_column_and_needs_a_bias() -> None:
    spike = (Spike("bias", 9, 33, "0x43e00000"),)
    assert tensors({"n": 32, "bias": True}, spikes=spike)["bias"][1] == 448.0
    assert "bias" not in tensors({"n": 32}, spikes=spike)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bits", ["0x7f800000", "0xff800000", "0x7fc00000"])
def test_inf_and_nan_spikes_stay(dtype: str, bits: str) -> None:
    x = tensors({"dtype": dtype}, values="inf_nan", spikes=(Spike("weight", 1, 2, bits),))
    planted = x["weight"][1, 2]
    assert np.array_equal(planted, np.uint32(int(bits, 16)).view(np.float32), equal_nan=True)


def test_a_finite_spike_past_bf16_saturates_instead_of_becoming_inf() -> None:
    spikes = (Spike("input", 0, 0, "0x7f7fffff"), Spike("input", 0, 1, "0xff7fffff"))
    x = tensors({"dtype": "bf16"}, spikes=spikes)["input"]
    largest = float(ml_dtypes.finfo(BF16).max)
    assert x[0, :2].tolist() == [largest, -largest]
    assert tensors({"dtype": "fp32"}, spikes=spikes)["input"][0, 0] == np.finfo(np.float32).max


@pytest.mark.parametrize("regime", ["wild", "lattice"])
def test_every_row_of_an_expanded_gradient_is_row_zero(regime: str) -> None:
    spike = (Spike("grad_output", 0, 3, "0x43e00000"), Spike("grad_output", 2, 4, "0x7f800000"))
    spec = {"m": 5, "n": 32, "batch": 2, "grad_layout": "expanded"}
    x = tensors(spec, regime=regime, spikes=spike)["grad_output"]
    assert x.shape == (10, 32) and (x == x[0]).all()
    assert x[7, 3] == 448.0 and np.isfinite(x).all()  # only spikes of row 0 are seen
