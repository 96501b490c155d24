"""Meta tests: do the strategies reach every corner they claim to reach, and how often?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness import case as case_module
from harness.case import Case, DataSpec, Spec, dump_case, load_case
from harness.recipe import load_recipes, runnable
from harness.strategies import SPIKES, WILD, batches, cases, data_specs, specs

#: As a campaign on CPU draws them.
RECIPES = {n: able for n, r in load_recipes().items() if (able := runnable(r, "cpu"))}
ALL = list(RECIPES.values())
T = TypeVar("T")


def drawn(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    seen: list[T] = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: T) -> None:
        seen.append(value)

    collect()
    return seen


@cache
def many_cases() -> tuple[Case, ...]:
    return tuple(drawn(cases(ALL), 600))


@cache
def many_data() -> tuple[DataSpec, ...]:
    return tuple(drawn(data_specs(), 600))


def histogram(key: Callable[[Spec], Any]) -> Counter[Any]:
    return Counter(key(c.spec) for c in many_cases())


def literal(name: str) -> set[str]:
    return set(get_args(getattr(case_module, name)))


def test_every_recipe_is_drawn_and_none_rules() -> None:
    seen = histogram(lambda s: s.recipe)
    assert set(seen) == set(RECIPES)
    assert max(seen.values()) < 0.5 * len(many_cases())


def test_every_backend_of_every_recipe_is_drawn() -> None:
    seen = histogram(lambda s: (s.recipe, s.backend))
    assert set(seen) == {(r.name, b) for r in ALL for b in r.backends}


def test_every_dtype_a_recipe_supports_is_drawn_and_no_other() -> None:
    seen = histogram(lambda s: (s.recipe, s.dtype))
    assert set(seen) == {(r.name, d) for r in ALL for d in r.dtypes}


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("input_layout", "Layout"),
        ("grad_layout", "GradLayout"),
        ("checkpoint", "Checkpoint"),
        ("dtype", "Dtype"),
    ],
)
def test_every_value_of_every_enum_is_drawn_often_enough(attribute: str, kind: str) -> None:
    seen = histogram(lambda s: getattr(s, attribute))
    assert set(seen) == literal(kind)
    assert min(seen.values()) > 0.05 * len(many_cases())


def test_bias_and_batch_are_drawn_both_ways() -> None:
    assert set(histogram(lambda s: s.bias)) == {False, True}
    assert set(histogram(lambda s: s.batch)) == {0, 2, 3}


@pytest.mark.parametrize("dim", ["m", "k", "n"])
def test_every_dimension_is_aligned_misaligned_empty_and_one(dim: str) -> None:
    seen = Counter(getattr(s, dim) for s in drawn(specs(ALL), 2000))
    assert seen[0] > 0, "never empty"
    assert seen[1] > 0, "never one"
    assert sum(n for size, n in seen.items() if size % 16) > 20, "hardly ever misaligned"
    assert sum(n for size, n in seen.items() if size and size % 16 == 0) > 1000
    assert max(seen) >= 128


def test_most_cases_are_aligned_so_that_most_of_them_run() -> None:
    refused = sum(bool(RECIPES[c.spec.recipe].may_refuse(c.spec)) for c in many_cases())
    assert 0 < refused < 0.3 * len(many_cases())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_without_wild_shapes_no_recipe_may_refuse(name: str) -> None:
    recipe = RECIPES[name]
    for spec in drawn(specs([recipe], wild_shapes=False), 300):
        shape = (spec.batch, spec.m, spec.k, spec.n)
        assert recipe.may_refuse(spec) == "", shape
        assert min(spec.tokens, spec.k, spec.n) > 0, shape


@pytest.mark.parametrize("largest", [32, 64, 128])
def test_dimensions_stay_near_the_largest_asked_for(largest: int) -> None:
    for spec in drawn(specs(ALL, largest=largest), 300):
        assert max(spec.m, spec.k, spec.n) <= largest + 31


def test_both_regimes_have_a_fair_share() -> None:
    lattice = sum(d.regime == "lattice" for d in many_data()) / len(many_data())
    assert 0.3 < lattice < 0.7


def test_every_value_class_is_drawn() -> None:
    assert set(WILD) == literal("ValueClass")
    seen = Counter(d.values for d in many_data() if d.regime == "wild")
    assert set(seen) == set(WILD)
    assert min(seen.values()) >= 10


def test_lattice_data_are_never_spiked_because_spikes_leave_the_grid() -> None:
    assert not any(d.spikes for d in many_data() if d.regime == "lattice")


def test_every_exponent_and_every_spike_pattern_is_drawn() -> None:
    for name in ("input_exponent", "weight_exponent", "grad_exponent"):
        assert {getattr(d, name) for d in many_data()} == {0, 1, -3, 7, -9}
    bits = {s.bits for d in drawn(data_specs(), 2000) for s in d.spikes}
    assert bits == set(SPIKES)


def test_spikes_reach_every_tensor() -> None:
    seen = {s.tensor for d in many_data() for s in d.spikes}
    assert seen == literal("TensorName")


def test_inf_nan_data_always_carry_an_inf_or_a_nan() -> None:
    # the class has no other source of special values than its spikes
    for data in many_data():
        if data.regime == "wild" and data.values == "inf_nan":
            values = [np.uint32(int(s.bits, 16)).view(np.float32) for s in data.spikes]
            assert not np.isfinite(values).all(), data.spikes


def test_every_drawn_case_is_a_valid_case() -> None:
    for case in many_cases():
        assert load_case(dump_case(case)) == case


def test_hardly_any_case_is_drawn_twice() -> None:
    assert len({c.id for c in many_cases()}) > 0.75 * len(many_cases())


def test_a_batch_shares_one_spec_and_varies_its_data() -> None:
    for batch in drawn(batches(ALL, draws=5), 30):
        assert len(batch) == 5 and len({c.spec for c in batch}) == 1
    assert any(len({c.data for c in b}) > 1 for b in drawn(batches(ALL, draws=5), 30))


def test_compiled_batches_are_mostly_aligned() -> None:
    specs_ = [b[0].spec for b in drawn(batches(ALL, compile="aot_eager", draws=1), 300)]
    assert {s.compile for s in specs_} == {"aot_eager"}
    odd = sum(any(d % 16 for d in (s.m, s.k, s.n)) for s in specs_)
    assert 0 < odd < 0.25 * len(specs_)


def test_drawing_a_case_costs_less_than_5_ms() -> None:
    strategy = cases(ALL)
    drawn(strategy, 20)  # first draws build the strategy
    start = time.process_time()
    got = drawn(strategy, 300)
    assert (time.process_time() - start) / len(got) < 0.005
