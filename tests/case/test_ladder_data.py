"""Ladder data: every element is a rung, and quantisation leaves it as it is."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from narrowfuzz.case.data import make_tensors
from narrowfuzz.case.ladder_data import STEP
from narrowfuzz.case.spec import Case, DataSpec, Gemm, Spec
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.accumulator import HOPPER
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.numerics.outcomes import MOST_STEPS
from narrowfuzz.numerics.plan import ROLES, Fp32Scale, Plan
from samples import recipes

RECIPES = recipes()
GEMMS: tuple[Gemm, ...] = get_args(Gemm)
#: E2M1 has eight magnitudes and its tensor scale no powers of two: of NVFP4 no ladder is judged.
LAID = sorted(name for name in RECIPES if "nvfp4" not in name)
TENSORWISE = "torchao.float8.tensorwise"


def plan_of(spec: Spec) -> Plan:
    return RECIPES[spec.recipe].plan(spec).added_by(HOPPER, spec.dtype)


def tensors(gemm: Gemm, seed: int = 0, data: dict[str, Any] | None = None, **fields: Any) -> Any:
    spec = Spec(**{"recipe": TENSORWISE, "backend": "real", "dtype": "fp32"} | fields)
    case = Case(spec=spec, data=DataSpec(regime="ladder", gemm=gemm, seed=seed, **(data or {})))
    return make_tensors(case, RECIPES[spec.recipe].plan(spec))


def operands(gemm: Gemm, made: dict[str, F32]) -> tuple[F64, F64]:
    a, b = reference.canonical_operands(gemm, made)
    return a.astype(np.float64), b.astype(np.float64)


def test_a_ladder_is_laid_for_what_a_layer_multiplies() -> None:
    assert GEMMS == ROLES


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", LAID)
def test_operands_quantise_without_any_error_by_one_power_of_two(recipe: str, gemm: Gemm) -> None:
    for backend in RECIPES[recipe].backends:
        spec = Spec(recipe=recipe, backend=backend, m=128, k=128, n=256)
        data = DataSpec(regime="ladder", gemm=gemm, seed=3, input_exponent=1, weight_exponent=-3)
        planned = plan_of(spec).gemms[gemm]
        made = make_tensors(Case(spec=spec, data=data), RECIPES[recipe].plan(spec))
        for x, plan in zip(
            reference.canonical_operands(gemm, made), (planned.a, planned.b), strict=True
        ):
            quantised = reference.quantise(x, plan)
            if quantised is not None:
                assert (quantised.values == x).all()
                assert len(np.unique(quantised.scale)) == 1
                if isinstance(plan.scale, Fp32Scale):
                    assert (np.frexp(quantised.scale)[0] == 0.5).all()


@pytest.mark.parametrize("gemm", GEMMS)
def test_products_meet_in_few_steps_and_maxima_meet_zeros(gemm: Gemm) -> None:
    a, b = operands(gemm, tensors(gemm, m=160, k=384, n=512))
    met = (a != 0.0) & (b != 0.0).any(axis=0)
    steps = [len(np.unique(np.flatnonzero(row) // STEP)) for row in met]
    assert set(steps) <= set(range(1, MOST_STEPS + 1)) and len(set(steps)) == 3
    assert (np.abs(a).max(axis=1) == np.abs(a).max()).all()
    assert (np.abs(b).max(axis=1) == np.abs(b).max()).all()
    assert np.abs(a @ b.T).max() < 2.0**14


def places(row: F64) -> tuple[str, bool]:
    """Where a row's small products stand, seen from its first large one, and whether the large one
    is taken back."""
    at = np.flatnonzero(row)
    large = [c for c in at if c % STEP and c % 2 == 0]
    small = [c for c in at if c % 2 == 1]
    steps = {c // STEP - large[0] // STEP for c in small}
    runs = {c // (4 * STEP) - large[0] // (4 * STEP) for c in small}
    where = "step" if steps == {0} else "run" if runs == {0} else "elsewhere"
    return where, len(large) == 2


def test_rungs_stand_everywhere_with_and_without_what_takes_the_large_product_back() -> None:
    seen: set[tuple[str, bool]] = set()
    for seed in range(4):
        a, _ = operands("output", tensors("output", seed, k=512))
        seen |= {places(row) for row in a}
    assert seen == {(w, back) for w in ("step", "run", "elsewhere") for back in (False, True)}


def test_rungs_lie_on_both_sides_of_every_accumulators_last_bit() -> None:
    a, b = operands("output", tensors("output", k=64, m=64, n=64))
    exponents = {
        int(np.frexp(np.abs(p))[1]) - 13 for x in a for y in b for p in (x * y)[(x * y) != 0.0]
    }
    assert set(range(-19, -4)) <= exponents and max(exponents) == 0
    assert {1.0, 1.5} == {float(2 * np.frexp(np.abs(p))[0]) for p in b[:, 3]}


@pytest.mark.parametrize("contracted", [0, 1, 2, 3, 4, 5, 31, 33, 35, 36])
def test_any_length_can_be_laid_out(contracted: int) -> None:
    a, b = operands("output", tensors("output", k=contracted))
    assert a.shape == b.shape == (32, contracted)
    products = (a[:, None, :] * b[None, :, :]) != 0.0
    assert products.any() == (contracted >= 4)


def test_the_third_tensor_is_gaussian_and_the_bias_nothing() -> None:
    made = tensors("output", bias=True)
    assert (made["bias"] == 0.0).all() and len(np.unique(made["grad_output"])) > 900


def test_tensors_are_those_of_the_seed_whatever_the_device_adds() -> None:
    one, same, other = (tensors("grad_weight", seed) for seed in (1, 1, 2))
    assert all((one[name] == same[name]).all() for name in one)
    assert not (one["grad_output"] == other["grad_output"]).all()
