"""The minimiser, without torch: a synthetic ``shows`` says what the divergence needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec, Spike
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.triage import minimise as module
from narrowfuzz.triage.minimise import DRAWS, REACH, Shows, minimise

EXAMPLES = settings(max_examples=150, deadline=None, database=None, derandomize=True)
DIMS = ("m", "k", "n", "batch")
#: Every field but the sizes, the model and what names the experiment.
FIELDS = (
    "bias", "dtype", "input_layout", "grad_layout", "weight_layout", "checkpoint", "heads",
    "attention", "autocast", "grad_mode", "steps", "microbatches", "optimizer", "loss_scaling",
    "clipping", "lifecycle", "dynamic", "fullgraph", "memory_budget", "kernels", "threads",
)  # fmt: skip
DATA_FIELDS = ("regime", "gemm", "input_exponent", "weight_exponent", "grad_exponent")
SPIKE = Spike("input", 3, 5, "0x43e00001")
OTHERS = (Spike("weight", 0, 0, "0x7f800000"), Spike("bias", 1, 1, "0x00000001"))
LARGE = Case(
    spec=Spec(
        recipe="torchao.float8.rowwise", backend="emulated", m=96, k=128, n=33, batch=3, bias=True,
        dtype="fp32", input_layout="strided", grad_layout="expanded", weight_layout="strided",
        checkpoint="full", model="two_blocks", heads=4, attention="math", autocast=True,
        grad_mode="no_grad", steps=3, microbatches=2, optimizer="adamw", loss_scaling="grad_scaler",
        clipping="norm", lifecycle="reload", dynamic=True, fullgraph=True, memory_budget=50,
        kernels="native", threads=4,
    ),
    data=DataSpec(
        regime="lattice", gemm="grad_input", values="inf_nan", seed=77, input_exponent=7,
        weight_exponent=-3, grad_exponent=1, spikes=(OTHERS[0], SPIKE, OTHERS[1]),
    ),
)  # fmt: skip


#: Written down anew: what a model is made of, and any model is tried as one linear.
ANCESTORS = {
    "two_blocks": {"llama_block", "attention", "mlp_swiglu", "rmsnorm_linear", "linear"},
    "joined_blocks": {"llama_block", "attention", "mlp_swiglu", "rmsnorm_linear", "linear"},
    "llama_block": {"attention", "mlp_swiglu", "rmsnorm_linear", "linear"},
    "tied_embedding": {"rmsnorm_linear", "linear"},
    "linear": set(),
} | {
    name: {"linear"}
    for name in (
        "mlp_gelu", "mlp_swiglu", "rmsnorm_linear", "layernorm_linear", "attention", "dropout",
        "used_twice", "frozen_first", "hooked", "own_forward",
    )
}  # fmt: skip


def spec_with(case: Case, **changes: Any) -> Case:
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, **changes))


def data_with(case: Case, **changes: Any) -> Case:
    return msgspec.structs.replace(case, data=msgspec.structs.replace(case.data, **changes))


@cache
def default(struct: type[msgspec.Struct], name: str) -> Any:
    return next(f.default for f in msgspec.structs.fields(struct) if f.name == name)


def steps(case: Case) -> Iterator[Case]:
    """Every case one step simpler, written down anew from the minimiser's promise."""
    for i in range(len(case.data.spikes)):
        yield data_with(case, spikes=case.data.spikes[:i] + case.data.spikes[i + 1 :])
    for name in DATA_FIELDS:
        yield data_with(case, **{name: default(DataSpec, name)})
    classes = [*REACH, "inf_nan"]
    for values in classes[: classes.index(case.data.values)]:
        yield data_with(case, values=values)
    for name in FIELDS:
        yield spec_with(case, **{name: default(Spec, name)})
    for model in ANCESTORS[case.spec.model]:
        yield spec_with(case, model=model)
    for name in DIMS:
        size = getattr(case.spec, name)
        if size >= 2:
            yield spec_with(case, **{name: size // 2})
    if case.spec.batch:
        yield spec_with(case, batch=0)


def on_any_draw(shows: Shows, case: Case) -> bool:
    seeds = [case.data.seed, *range(1, DRAWS)]
    return any(shows(data_with(case, seed=seed)) for seed in seeds)


@st.composite
def needs(draw: st.DrawFn) -> Callable[[Case], bool]:
    """A divergence that needs some of the large case's fields, sizes, spikes and value classes."""
    fields = draw(st.sets(st.sampled_from(FIELDS)))
    data = draw(st.sets(st.sampled_from(DATA_FIELDS)))
    least = {name: draw(st.integers(0, getattr(LARGE.spec, name))) for name in DIMS}
    spike = draw(st.booleans())
    classes = draw(st.sets(st.sampled_from(REACH))) | {"inf_nan"}
    models = draw(st.sets(st.sampled_from(sorted(ANCESTORS)))) | {"two_blocks"}
    trade = draw(st.booleans())

    def shows(case: Case) -> bool:
        spec = case.spec
        if trade and case.data.regime == "wild" and spec.k < 64:
            return False  # a field's reset becomes possible or impossible with a dimension
        return (
            all(getattr(spec, f) == getattr(LARGE.spec, f) for f in fields)
            and all(getattr(case.data, f) == getattr(LARGE.data, f) for f in data)
            and all(getattr(spec, d) >= least[d] for d in DIMS)
            and (SPIKE in case.data.spikes or not spike)
            and case.data.values in classes
            and spec.model in models
        )

    return shows


@EXAMPLES
@given(needs())
def test_it_ends_where_no_single_step_keeps_the_divergence(shows: Shows) -> None:
    small = minimise(LARGE, shows)
    assert shows(small.case)
    simpler = [c for c in steps(small.case) if c != small.case and on_any_draw(shows, c)]
    assert not simpler
    assert not small.untried


@pytest.mark.heavy
@EXAMPLES
@given(needs(), st.integers(0, 2**32 - 1))
def test_it_is_deterministic_and_keeps_what_names_the_experiment(shows: Shows, seed: int) -> None:
    case = data_with(LARGE, seed=seed)
    small, again = minimise(case, shows), minimise(case, shows)
    assert (small.case, small.attempts) == (again.case, again.attempts)
    kept = ("recipe", "backend", "compile")
    assert all(getattr(small.case.spec, f) == getattr(case.spec, f) for f in kept)


@EXAMPLES
@given(st.sets(st.integers(1, DRAWS - 1), min_size=1))
def test_an_attempt_counts_if_any_of_five_draws_shows_it(seeds: set[int]) -> None:
    def shows(case: Case) -> bool:
        return case == LARGE or case.data.seed in seeds

    small = minimise(LARGE, shows)
    assert small.case.data.seed in seeds
    assert shows(small.case)
    assert small.case.spec.k <= 1 and small.case.data.spikes == ()
    assert small.case.spec.model == "linear"


def test_every_field_of_a_spec_is_tried_or_names_the_experiment() -> None:
    kept = {"recipe", "backend", "compile", "events"}  # events: tests/rules/test_trainings.py
    of_library = {"wraps", "layout", "depth", "quantized_init", "settings"}
    kept |= {"sharding"}  # tests/rules/test_sharded.py
    assert {*FIELDS, *DIMS, "model"} | kept | of_library == set(Spec.__struct_fields__)
    changed = [f for f in FIELDS if getattr(LARGE.spec, f) == default(Spec, f)]
    assert not changed, "a field at its default shows nothing"


@pytest.mark.parametrize("model", get_args(ModelName))
def test_what_a_model_is_made_of_is_tried_smallest_first(model: ModelName) -> None:
    tried: list[str] = []

    def shows(case: Case) -> bool:
        if case.spec.model not in tried:
            tried.append(case.spec.model)
        return case.spec.model == model

    small = minimise(spec_with(LARGE, model=model), shows)
    assert small.case.spec.model == model
    smaller = ANCESTORS.get(model, set(MODELS[model].smaller))
    assert set(tried) - {model} == smaller
    first = next((name for name in ("linear", "sdpa", "flex_attention") if name in smaller), "")
    assert [name for name in tried if name != model][:1] == ([first] if smaller else [])


@pytest.mark.parametrize("needed", ["linear", "attention", "mlp_swiglu", "llama_block"])
def test_it_ends_at_the_smallest_model_that_shows_it(needed: str) -> None:
    holds = {name for name in ANCESTORS if needed == name or needed in ANCESTORS[name]}
    small = minimise(LARGE, lambda case: case.spec.model in holds)
    assert small.case.spec.model == needed
    spec = small.case.spec
    assert all(getattr(spec, f) == default(Spec, f) for f in FIELDS)


def test_the_model_is_reset_along_with_the_rest_where_each_build_is_dear() -> None:
    small = minimise(LARGE, lambda case: True, builds=1)
    assert small.case.spec.model == "linear"
    assert all(getattr(small.case.spec, f) == default(Spec, f) for f in FIELDS)


def test_a_case_that_never_shows_again_is_left_as_it_is() -> None:
    small = minimise(LARGE, lambda case: False)
    assert small.case == LARGE
    assert small.attempts and small.attempts % DRAWS == 0


def test_the_simplest_case_stays() -> None:
    simplest = Case(spec=Spec(recipe="torch.fp32", m=1, k=1, n=1), data=DataSpec())
    assert minimise(simplest, lambda case: True).case == simplest


@EXAMPLES
@given(needs(), st.integers(1, 20))
def test_it_changes_the_program_no_more_often_than_the_budget_of_builds(
    shows: Shows, builds: int
) -> None:
    built: list[Spec] = []

    def watched(case: Case) -> bool:
        if not built or built[-1] != case.spec:
            built.append(case.spec)
        return shows(case)

    small = minimise(LARGE, watched, builds=builds)
    assert shows(small.case)
    # back at the best Spec the kept artefact serves: only a Spec seen first is a build
    assert (
        len({msgspec.json.encode(s) for s in built} - {msgspec.json.encode(LARGE.spec)}) <= builds
    )


def test_what_the_budget_of_builds_left_untried_is_listed() -> None:
    small = minimise(LARGE, lambda case: case.spec.bias, builds=1)
    assert small.case.data == DataSpec(seed=small.case.data.seed)  # data costs no build
    assert {"m/2", "k/2", "n/2", "batch/2"} <= set(small.untried)
    assert len(small.untried) == len(set(small.untried))
    assert not minimise(LARGE, lambda case: case.spec.bias, builds=1000).untried


def test_tame_data_come_first_and_irrelevant_options_go_in_one_build() -> None:
    tried: list[Case] = []

    def shows(case: Case) -> bool:
        tried.append(case)
        return True

    minimise(LARGE, shows, builds=1)
    assert tried[0].spec == LARGE.spec and tried[0].data.values == "gaussian"
    assert all(getattr(tried[1].spec, f) == default(Spec, f) for f in FIELDS)


class Clock:
    """A clock that moves by one second per attempt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def tick(self, shows: Shows) -> Shows:
        def ticking(case: Case) -> bool:
            self.now += 1.0
            return shows(case)

        return ticking


@pytest.mark.parametrize("seconds", [0.5, 3.0, 10.0, 40.0])
def test_it_stops_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    shows = Clock(monkeypatch).tick(lambda case: False)
    small = minimise(LARGE, shows, seconds=seconds)
    assert small.attempts <= seconds + DRAWS
    assert "k/2" in small.untried


@pytest.mark.parametrize("builds", [0, 5])
def test_without_any_time_everything_is_listed_as_untried(
    monkeypatch: pytest.MonkeyPatch, builds: int
) -> None:
    clock = Clock(monkeypatch)
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(ticks)))
    small = minimise(LARGE, clock.tick(lambda case: True), seconds=0.5, builds=builds)
    assert (small.case, small.attempts) == (LARGE, 0)
    assert {"k/2", "bias", "regime", "spike 0"} <= set(small.untried)


def test_the_hint_alone_lets_the_rest_shrink() -> None:
    """The outlier class hides the element in the largest dimensions; planted alone it survives."""
    hint = Spike("input", 0, 0, "0x43e00001")
    case = Case(
        spec=Spec(recipe="torch.fp32", m=64, k=64, n=64), data=DataSpec(values="outlier", seed=9)
    )

    def shows(case: Case) -> bool:
        by_chance = case.data.values == "outlier" and case.spec.m >= 64 and case.data.seed == 9
        return by_chance or hint in case.data.spikes

    without, with_hint = minimise(case, shows), minimise(case, shows, hint=hint)
    assert (without.case.spec.m, without.case.data.values) == (64, "outlier")
    assert (with_hint.case.spec.m, with_hint.case.data.values) == (1, "gaussian")
    assert with_hint.case.data.spikes == (hint,)


def test_a_useless_hint_is_dropped() -> None:
    hint = Spike("input", 0, 0, "0x43e00001")
    small = minimise(LARGE, lambda case: SPIKE in case.data.spikes, hint=hint)
    assert small.case.data.spikes == (SPIKE,)
    small = minimise(LARGE, lambda case: True, hint=hint)
    assert small.case.data.spikes == ()


def test_minimising_tries_other_data_and_the_same_transformation() -> None:
    """The seed of the data is not what a relation chooses its permutation by."""
    tried: set[int] = set()

    def shows(case: Case) -> bool:
        tried.add(case.data.choice)
        return case.data.seed == 3

    start = msgspec.structs.replace(LARGE, data=DataSpec(seed=17, values="outlier"))
    small = minimise(start, shows)
    assert tried <= {17, 3} and 17 in tried
    assert small.case.data.seed == 3
