"""Meta tests: do the strategies reach every corner they claim to reach, and how often?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from draws import drawn_apart as drawn
from hypothesis import strategies as st
from narrowfuzz.case import spec as case_module
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec, compile_key, dump_case, load_case
from narrowfuzz.draw.specs import DIRECT, FACTORS, FRAGILE, of_rung, partly_recomputed, specs
from narrowfuzz.draw.strategies import (
    NAN,
    OF_OPERATORS,
    SPIKES,
    WILD,
    batches,
    cases,
    data_specs,
    ladder_percent_high,
)
from narrowfuzz.models.catalog import COMPOSED
from narrowfuzz.recipe.recipe import load_recipes, runnable
from samples import recipes

#: One worker draws for all of them.
pytestmark = pytest.mark.xdist_group("drawn specs")
#: As a campaign on CPU draws them.
RECIPES = {n: able for n, r in recipes().items() if (able := runnable(r, "cpu"))}
#: A recipe of single operators alone is drawn by them (test_operator_specs.py).
ALL = [recipe for recipe in RECIPES.values() if recipe.takes("linear")]


@cache
def many_cases() -> tuple[Case, ...]:
    return tuple(drawn(cases(ALL), 800))


@cache
def many_data() -> tuple[DataSpec, ...]:
    return tuple(drawn(data_specs(), 800))


@cache
def many_specs() -> tuple[Spec, ...]:
    return tuple(drawn(specs(ALL), 1000))


def histogram(key: Callable[[Spec], Any]) -> Counter[Any]:
    return Counter(key(c.spec) for c in many_cases())


def literal(name: str) -> set[str]:
    return set(get_args(getattr(case_module, name)))


def test_every_recipe_is_drawn_and_none_rules() -> None:
    seen = histogram(lambda s: s.recipe)
    assert set(seen) == {recipe.name for recipe in ALL}
    assert max(seen.values()) < 0.5 * len(many_cases())


def test_every_backend_of_every_recipe_is_drawn() -> None:
    seen = histogram(lambda s: (s.recipe, s.backend))
    assert set(seen) == {(r.name, b) for r in ALL for b in r.backends}


@pytest.mark.parametrize(
    ("name", "backend", "grid", "of"),
    [
        ("torchao.mxfp8.rceil", "triton", 128, 32),
        ("torchao.mxfp8.rceil", "linear", 32, 32),
        ("torchao.nvfp4", "triton", 128, 128),
        ("torchao.blockwise_fp8", "triton", 128, 128),
    ],
)
def test_dimensions_are_multiples_of_what_the_backend_wants(
    name: str, backend: str, grid: int, of: int
) -> None:
    recipe = replace(load_recipes()[name], backends=(backend,))
    drawn_specs = drawn(specs([recipe]), 100)
    sizes = [(spec.m, spec.k, spec.n) for spec in drawn_specs]
    assert all(size % grid == 0 for dims in sizes for size in dims if size and size % of == 0)
    assert sum(all(size and size % grid == 0 for size in dims) for dims in sizes) > 50
    assert len({size for dims in sizes for size in dims if size and size % grid == 0}) > 1


def test_every_dtype_a_recipe_supports_is_drawn_and_no_other() -> None:
    seen = histogram(lambda s: (s.recipe, s.dtype))
    assert set(seen) == {(r.name, d) for r in ALL for d in r.dtypes}


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("input_layout", "InputLayout"),
        ("grad_layout", "GradLayout"),
        ("checkpoint", "Checkpoint"),
    ],
)
def test_every_value_of_every_enum_is_drawn_often_enough(attribute: str, kind: str) -> None:
    seen = histogram(lambda s: getattr(s, attribute))
    assert set(seen) == literal(kind)
    assert min(seen.values()) > 0.05 * len(many_cases())


def test_every_dtype_is_drawn() -> None:
    assert set(histogram(lambda s: s.dtype)) == literal("Dtype")


@pytest.mark.heavy
def test_a_weight_used_twice_and_dropout_come_twice_as_often() -> None:
    many = drawn(specs(ALL), 6000)  # Hypothesis draws in clusters
    seen = Counter(s.model for s in many if s.model != "linear")
    often = {"used_twice", "tied_embedding", "dropout"}
    usual = [n for name, n in seen.items() if name not in often]
    for name in often:
        assert 1.4 < seen[name] / (sum(usual) / len(usual)) < 2.8, name


@pytest.mark.parametrize("recipe", [n for n, r in RECIPES.items() if r.autocasts])
def test_autocast_is_drawn_of_every_recipe_that_is_made_for_it(recipe: str) -> None:
    found = drawn(specs([RECIPES[recipe]]), 60)
    assert any(s.autocast for s in found)


def test_every_torchao_recipe_that_takes_fp32_is_drawn_under_autocast() -> None:
    narrowed = {n for n, r in RECIPES.items() if r.autocasts}
    assert {n for n, r in RECIPES.items() if n.startswith("torchao") and "fp32" in r.dtypes} <= (
        narrowed
    )


OF_MODELS = {
    "sgd", "adamw", "sgd_momentum", "sgd_momentum_fused", "adam_foreach", "adam_fused",
    "adamw_fused",
}  # fmt: skip
RARE = (
    ("model", set(COMPOSED), 0.003),
    ("grad_mode", literal("GradMode"), 0.02),
    ("lifecycle", literal("Lifecycle"), 0.04),
    ("optimizer", OF_MODELS, 0.001),
    ("attention", {"flash", "math"}, 0.05),
    ("heads", {1, 2, 4}, 0.05),
    ("steps", {1, 2, 3, 5}, 0.01),
    ("microbatches", {1, 2, 3}, 0.01),
    ("autocast", {False, True}, 0.005),
)  # fmt: skip


@pytest.mark.parametrize(("attribute", "values", "share"), RARE, ids=[r[0] for r in RARE])
def test_every_value_of_what_came_with_models_is_drawn(
    attribute: str, values: set[Any], share: float
) -> None:
    seen = Counter(getattr(spec, attribute) for spec in many_specs())
    assert set(seen) == values
    assert min(seen.values()) >= share * len(many_specs())


def test_half_of_all_specs_are_one_linear_because_most_rules_judge_it() -> None:
    assert 0.35 < histogram(lambda s: s.model)["linear"] / len(many_cases()) < 0.65


@cache
def compiled_specs(rung: Compile) -> tuple[Spec, ...]:
    return tuple(drawn(specs(ALL, compile=rung), 150))


@pytest.mark.parametrize("rung", sorted(get_args(Compile)))
def test_a_compilers_options_are_drawn_where_there_is_one(rung: Compile) -> None:
    found = compiled_specs(rung)
    compiles = rung != "none"
    both, one = {False, True}, {False}
    assert {s.compile for s in found} == {rung}
    assert {s.dynamic for s in found} == {s.fullgraph for s in found} == (both if compiles else one)
    # aot_eager partitions nothing: a budget would say nothing
    budgets = {100} if rung in ("none", "aot_eager") else {100, 50, 0}
    assert {s.memory_budget for s in found} == budgets


class TestDrawnSpecsMakeSense:
    """What a drawn Spec asks for is there to be had."""

    def test_autocast_narrows_fp32_of_a_recipe_that_says_so(self) -> None:
        for spec in (c.spec for c in many_cases()):
            assert not spec.autocast or (spec.dtype == "fp32" and RECIPES[spec.recipe].autocasts)

    def test_only_what_trains_has_a_schedule(self) -> None:
        assert all(c.spec.trains or not c.spec.scheduled for c in many_cases())

    def test_token_ids_are_not_recomputed_by_the_reentrant_checkpoint(self) -> None:
        found = [s for s in many_specs() if s.model == "tied_embedding"]
        assert {s.checkpoint for s in found} == {"none", "full", "selective"}

    def test_only_one_linear_has_lattice_data_or_an_empty_dimension(self) -> None:
        for case in many_cases():
            spec = case.spec
            assert case.data.regime == "wild" or spec.direct
            assert spec.model == "linear" or min(spec.tokens, spec.k, spec.n) > 0

    def test_models_stay_small(self) -> None:
        wide = [s for s in drawn(specs(ALL, largest=128), 150) if s.model != "linear"]
        assert max(max(s.m, s.k, s.n) for s in wide) <= 64 + 31


@pytest.mark.parametrize("factor", [None, *sorted(FACTORS)])
def test_a_slice_varies_what_it_may_and_nothing_else(factor: str | None) -> None:
    """None of the factors: the simplest Spec of some recipe."""
    vary = frozenset() if factor is None else frozenset({factor})
    # graphs run on oneDNN's, and on one thread
    compile: Compile = "none" if factor in ("kernels", "threads") else "inductor"
    found = drawn(specs(ALL, compile=compile, vary=vary), 120)
    changed = {
        name
        for spec in found
        for name in Spec.__struct_fields__
        if getattr(spec, name) != getattr(simplest(spec), name)
    }
    allowed = FIELDS_OF.get(factor or "", {factor})
    assert changed == allowed - {None}


def simplest(spec: Spec) -> Spec:
    recipe = RECIPES[spec.recipe]
    return Spec(recipe=spec.recipe, backend=recipe.backends[0], dtype=recipe.dtypes[0],
                compile=spec.compile)  # fmt: skip


#: Factors whose fields have other names; a factor of models, or of fp32, does nothing alone.
FIELDS_OF: dict[str, set[str | None]] = {
    "attention": set(),
    "autocast": {"autocast"},
    "compiler": {"dynamic", "fullgraph", "memory_budget"},
    "dims": {"m", "k", "n"},
    "layout": {"input_layout", "grad_layout", "weight_layout"},
    "schedule": {"steps", "microbatches", "optimizer", "loss_scaling", "clipping", "events"},
    "shape": {"m", "k", "n"},
}


def test_what_is_partly_recomputed_is_what_inductor_may_break() -> None:
    found = drawn(partly_recomputed(ALL), 100)
    assert {s.model for s in found} == set(FRAGILE) and {s.compile for s in found} == {"inductor"}
    assert {s.checkpoint for s in found} == {"selective"}
    assert all(s.attention == "flash" and s.trains for s in found)
    # fp32 only where its recipe has nothing else
    assert all(s.dtype != "fp32" or set(RECIPES[s.recipe].dtypes) == {"fp32"} for s in found)
    assert all(not s.autocast or s.dtype == "fp32" for s in found)
    assert {s.steps > 1 for s in found} == {s.bias for s in found} == {True, False}


@pytest.mark.parametrize("rung", sorted(get_args(Compile)))
def test_a_rung_has_its_own_specs_and_inductor_some_blocks_recomputed_in_part(rung: Any) -> None:
    found = drawn(of_rung(ALL, rung), 150)
    assert {s.compile for s in found} == {rung}
    blocks = sum(s.model in FRAGILE and s.checkpoint == "selective" for s in found) / len(found)
    assert 0.15 < blocks < 0.4 if rung == "inductor" else blocks < 0.1


def test_what_attention_has_varies_on_models_only() -> None:
    found = drawn(specs(ALL, vary=frozenset({"model", "attention"})), 60)
    assert {s.heads for s in found if s.model != "linear"} == {1, 2, 4}
    assert {(s.heads, s.attention) for s in found if s.model == "linear"} == {(1, "flash")}


def test_bias_and_batch_are_drawn_both_ways() -> None:
    assert set(histogram(lambda s: s.bias)) == {False, True}
    assert set(histogram(lambda s: s.batch)) == {0, 2, 3}


@pytest.mark.parametrize("dim", ["m", "k", "n"])
def test_every_dimension_is_aligned_misaligned_empty_and_one(dim: str) -> None:
    seen = Counter(getattr(s, dim) for s in many_specs())
    assert seen[0] > 0, "never empty"
    assert seen[1] > 0, "never one"
    assert sum(n for size, n in seen.items() if size % 16) > 10, "hardly ever misaligned"
    assert sum(n for size, n in seen.items() if size and size % 16 == 0) > 250
    assert max(seen) >= 128


def test_most_cases_are_aligned_so_that_most_of_them_run() -> None:
    refused = sum(bool(RECIPES[c.spec.recipe].refusal(c.spec, "cpu")) for c in many_cases())
    assert 0 < refused < 0.3 * len(many_cases())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_without_wild_shapes_no_recipe_may_refuse(name: str) -> None:
    recipe = RECIPES[name]
    for spec in drawn(specs([recipe], wild_shapes=False), 40):
        shape = (spec.batch, spec.m, spec.k, spec.n)
        assert recipe.refusal(spec, "cpu") == "", shape
        assert min(spec.tokens, spec.k, spec.n) > 0, shape


@pytest.mark.parametrize("largest", [32, 64, 128])
def test_dimensions_stay_near_the_largest_asked_for(largest: int) -> None:
    for spec in drawn(specs(ALL, largest=largest), 100):
        assert max(spec.m, spec.k, spec.n) <= largest + 31


def test_both_regimes_have_a_fair_share() -> None:
    lattice = sum(d.regime == "lattice" for d in many_data()) / len(many_data())
    assert 0.3 < lattice < 0.7


def test_every_value_class_is_drawn() -> None:
    assert set(OF_OPERATORS) == literal("ValueClass")
    seen = Counter(d.values for d in many_data() if d.regime == "wild")
    assert set(seen) == set(WILD)
    assert min(seen.values()) >= 10


def kind_of_data(data: DataSpec) -> str:
    return "lattice" if data.regime == "lattice" else data.values


@pytest.mark.parametrize("model", ["linear", "mlp_gelu"])
def test_the_data_of_a_spec_are_of_as_many_kinds_as_there_are_and_meet_nan(
    model: ModelName,
) -> None:
    one: dict[str, Any] = (
        {"models": (model,), "linears": False} if model != "linear" else {"models": ()}
    )
    some = specs([RECIPES["torch.fp32"]], compile="inductor", vary=DIRECT, **one)
    for batch in drawn(batches(some, ladders=lambda spec: 0), 30):
        assert any(s.bits == NAN for case in batch for s in case.data.spikes)
        kinds = Counter(kind_of_data(case.data) for case in batch)
        if model != "linear":
            assert set(WILD) <= set(kinds) and "lattice" not in kinds
            continue
        lattice = kinds.pop("lattice")
        assert 4 <= lattice <= 10 and lattice + kinds.total() == 16
        assert {kind for kind, times in kinds.items() if times > 1} <= {"inf_nan"}


def test_lattice_data_are_never_spiked_because_spikes_leave_the_grid() -> None:
    assert not any(d.spikes for d in many_data() if d.regime == "lattice")


def test_every_exponent_and_every_spike_pattern_is_drawn() -> None:
    for name in ("input_exponent", "weight_exponent", "grad_exponent"):
        assert {getattr(d, name) for d in many_data()} == {0, 1, -3, 7, -9}
    bits = {s.bits for d in many_data() for s in d.spikes}
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


@cache
def many_ladders() -> tuple[tuple[Case, ...], ...]:
    """Batches of linears on a device that adds in a way of its own."""
    linears = specs(ALL, vary=DIRECT, wild_shapes=False, largest=64)
    found = drawn(batches(linears, draws=5, ladders=ladder_percent_high), 150)
    return tuple(batch for batch in found if batch[0].data.regime == "ladder")


def test_ladders_are_drawn_often_where_they_tell_most_and_rarely_elsewhere() -> None:
    assert 0.55 * 150 < len(many_ladders()) < 0.9 * 150
    linears = [c for c in drawn(cases(ALL, vary=DIRECT), 200) if c.spec.direct]
    assert 0.02 < sum(c.data.regime == "ladder" for c in linears) / len(linears) < 0.25
    assert not any(c.data.regime == "ladder" and not c.spec.direct for c in many_cases())


def test_a_ladder_has_as_many_products_as_promotions_and_splits_need_and_few_rows() -> None:
    contracted = {"output": "k", "grad_input": "n", "grad_weight": "m"}
    lengths = set()
    for batch in many_ladders():
        spec, gemm = batch[0].spec, batch[0].data.gemm
        assert {(c.spec, c.data.gemm) for c in batch} == {(spec, gemm)}
        length = spec.tokens if gemm == "grad_weight" else getattr(spec, contracted[gemm])
        others = {"m", "k", "n"} - {contracted[gemm]}
        assert max(getattr(spec, name) for name in others) <= 128
        assert not batch[0].data.spikes and spec.grad_layout != "expanded"
        lengths.add((gemm, length // 128))
    assert {gemm for gemm, tiles in lengths if tiles >= 2} == set(contracted)
    assert {tiles for _, tiles in lengths} >= {0, 2, 3, 4}


def test_no_recipe_refuses_what_a_ladder_is_laid_in() -> None:
    for batch in many_ladders():
        spec = batch[0].spec
        for device in ("cpu", "cuda"):
            before = RECIPES[spec.recipe].refusal(Spec(recipe=spec.recipe, dtype=spec.dtype,
                                                       backend=spec.backend), device)  # fmt: skip
            assert RECIPES[spec.recipe].refusal(spec, device) == before, spec


def test_a_forward_alone_has_a_ladder_of_its_output() -> None:
    linears = specs(ALL, vary=frozenset({"grad_mode"}))
    found = drawn(batches(linears, draws=1, ladders=ladder_percent_high), 50)
    forward = [b[0].data for b in found if not b[0].spec.trains]
    assert {d.gemm for d in forward if d.regime == "ladder"} == {"output"}


def test_a_batch_shares_one_spec_and_varies_its_data() -> None:
    found = drawn(batches(specs(ALL), draws=5), 30)
    for batch in found:
        few = batch[0].data.regime == "ladder" or batch[0].spec.events
        assert len(batch) == (2 if few else 5)
        assert len({c.spec for c in batch}) == 1
    assert any(len({c.data for c in batch}) > 1 for batch in found)


def test_a_dynamic_batch_shares_one_program_and_varies_its_rows_only() -> None:
    found = drawn(batches(specs(ALL, compile="aot_eager"), draws=5), 30)
    dynamic = [b for b in found if b[0].spec.dynamic]
    assert dynamic
    for batch in found:
        first = batch[0].spec
        rows = [first.m * (1 + i % 3) if first.dynamic else first.m for i in range(len(batch))]
        assert [c.spec for c in batch] == [msgspec.structs.replace(first, m=m) for m in rows]
        assert len({compile_key(c.spec) for c in batch}) == 1
        assert all(load_case(dump_case(c)) == c for c in batch)


def test_compiled_batches_are_mostly_aligned() -> None:
    specs_ = [b[0].spec for b in drawn(batches(specs(ALL, compile="aot_eager"), draws=1), 150)]
    assert {s.compile for s in specs_} == {"aot_eager"}
    odd = sum(any(d % 16 for d in (s.m, s.k, s.n)) for s in specs_)
    assert 0 < odd < 0.25 * len(specs_)


@pytest.mark.heavy
def test_drawing_a_case_costs_little() -> None:
    """Held against what the same machine takes to draw plain numbers."""

    def cost(strategy: st.SearchStrategy[Any]) -> float:
        drawn(strategy, 20)  # first draws build the strategy
        found = []
        for _ in range(5):
            start = time.process_time()
            count = len(drawn(strategy, 60))
            found.append((time.process_time() - start) / count)
        # what else the machine does only adds to a time: the least is the strategy's own
        return min(found)

    numbers = st.lists(st.integers(), min_size=20, max_size=20)
    assert cost(cases(ALL)) < 5 * cost(numbers)
