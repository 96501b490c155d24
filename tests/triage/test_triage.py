"""What is seen is shown first, as it was drawn, and then made smaller."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.arms.available import select_arms
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.ledger.severity import SMALL
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.trace.expect import Present
from narrowfuzz.trace.verdict import BAD, Verdict
from narrowfuzz.triage.effect import Effect, effect_of, excess, observed, worst_of
from narrowfuzz.triage.finding import Triaged
from narrowfuzz.triage.needs import lacking_of
from narrowfuzz.triage.triage import triage, unconfirmed
from narrowfuzz.triage.verify import ScriptRun
from samples import recipes

CASE = Case(
    spec=Spec(
        recipe="torchao.float8.rowwise", backend="emulated", m=16, k=32, n=16, bias=True,
        checkpoint="full",
    ),
    data=DataSpec(seed=3),
)  # fmt: skip


class Scripts:
    """Says of every script in turn whether it shows what is planted; of the last one for ever."""

    def __init__(self, *shows: bool) -> None:
        self.shows, self.told = list(shows), 0

    def __call__(
        self, path: Path, *, timeout: float = 0.0, plant: tuple[str, str] | None = None
    ) -> ScriptRun:
        if plant is None:
            return ScriptRun(0, "gone")
        now = self.shows[min(self.told, len(self.shows) - 1)]
        self.told += 1
        return ScriptRun(int(now), "there" if now else "gone")


def seen(judge: Judge) -> Verdict:
    return next(v for v in judge.judge(CASE).causes if v.rule == "O5")


def triaged(scripts: Scripts) -> tuple[Triaged, list[Triaged]]:
    """The finding, and what was told before it."""
    judge = Judge(recipes(), Ledger([]), select_arms(()))
    told: list[Triaged] = []
    with builtin_faults()["gemm-gain"].plant():
        done = triage(
            judge, CASE, seen(judge), seconds=3.0, plant=("", "gemm-gain"), scripts=scripts,
            shown=told.append,
        )  # fmt: skip
    return done, told


def test_the_drawn_case_is_told_of_before_it_is_made_smaller() -> None:
    done, (first,) = triaged(Scripts(True))
    assert first.confirmed and done.confirmed
    assert first.finding.fingerprint == done.finding.fingerprint
    large, small = first.finding.minimal, done.finding.minimal
    assert (large.spec.m, large.spec.k, large.spec.bias) == (16, 32, True)
    assert small.spec.k < 32 and not small.spec.bias
    assert first.finding.needs == [] and not first.finding.attempts
    assert done.finding.attempts and done.finding.case == first.finding.case
    assert first.script != done.script


def test_a_smaller_case_that_its_script_does_not_show_takes_no_ones_place() -> None:
    done, (first,) = triaged(Scripts(True, False))
    assert done.confirmed and done.finding.attempts
    assert done.finding.minimal == first.finding.minimal and done.script == first.script


def test_a_smaller_case_may_show_what_the_drawn_one_does_not() -> None:
    # a linear has two scripts
    done, told = triaged(Scripts(False, False, True))
    assert not told and done.confirmed
    assert done.finding.minimal.spec.k < 32


def test_what_no_script_shows_is_told_once_as_suspected() -> None:
    done, told = triaged(Scripts(False))
    assert not told and not done.confirmed
    assert "passes in a fresh process" in done.finding.why_suspected


def test_what_shows_again_as_a_consequence_shows_every_time() -> None:
    judge = Judge(recipes(), Ledger([]), select_arms(()))
    with builtin_faults()["gemm-gain"].plant():
        judgement = judge.judge(CASE)
        follows = next(
            v for v in judgement.verdicts if v.status in BAD and v not in judgement.causes
        )
        done = triage(
            judge, CASE, follows, seconds=3.0, plant=("", "gemm-gain"), scripts=Scripts(True)
        )
    assert done.finding.flake == "always"


@pytest.mark.parametrize(
    ("arm", "names"),
    [
        ("eager", {"eager"}),
        ("aot_eager", {"eager", "aot_eager"}),
        ("inductor_strict", {"eager", "aot_eager", "inductor_strict"}),
        ("inductor", {"eager", "aot_eager", "inductor_strict", "inductor"}),
        ("eager_native", set()),
    ],
)
def test_what_shows_first_shows_on_no_higher_rung(arm: str, names: set[str]) -> None:
    judge = Judge({}, Ledger([]), select_arms(()))
    rungs = {a.name for a in judge.rungs(Spec(recipe="torch.bf16", compile="inductor"))}
    spec = Spec(recipe="torch.bf16", compile="inductor")
    assert judge.beneath(spec, arm) == names & rungs


@pytest.mark.heavy
@pytest.mark.parametrize("drawn", [{"microbatches": 2}, {"model": "used_twice"}])
def test_what_is_missing_under_another_name_takes_no_more(drawn: dict[str, Any]) -> None:
    """A bias without a gradient is proj.bias.grad in a model, or in two microbatches, and grad_bias
    in one linear: the fingerprint says which, and neither is a condition."""
    recipe = "torchao.mxfp8.rceil_wgrad_with_hp"
    spec = Spec(recipe=recipe, backend="wrapper", bias=True)
    spec = msgspec.structs.replace(spec, **drawn)
    case = Case(spec=spec, data=DataSpec(seed=7))
    judge = Judge(recipes(), Ledger([]), select_arms(("eager",)))
    cause = next(v for v in judge.judge(case).causes if v.rule == "contract")
    found = triage(judge, case, cause, seconds=20.0, scripts=Scripts(True)).finding
    assert found.fingerprint == "contract--backward--eager--no grad_parameter--torchao.mxfp8"
    assert found.needs == ["bias=True"]
    assert {need.partition("=")[0] for need in found.needless} & {"microbatches", "model"}


def test_another_parameter_that_is_missing_is_another_divergence() -> None:
    verdicts = [
        Verdict("contract", "eager", "backward", "diverged", expect=Present(names))
        for names in (("grad_bias",), ("a.bias.grad", "b.bias.grad"), ("a.weight.grad",))
    ]
    bias, model, weight = map(lacking_of, verdicts)
    assert bias == model == {"bias"} and weight == {"weight"}
    assert not lacking_of(replace(verdicts[0], expect=None))


def test_what_has_no_plan_has_an_effect_too() -> None:
    """MXFP8 that takes a dimension of no whole blocks: nothing says what it should have been."""
    spec = Spec(recipe="torchao.mxfp8.rceil_wgrad_with_hp", m=159, k=129, n=64)
    case = Case(spec=spec, data=DataSpec(seed=3))
    judge = Judge(recipes(), Ledger([]), select_arms(("eager",)))
    with builtin_faults()["mx-ragged-block-dropped"].plant():
        (cause,) = judge.judge(case).causes
        assert effect_of(observed(judge, case, cause), cause) == SMALL


@pytest.mark.parametrize(
    ("got", "expected", "effect"),
    [
        ([1.0, math.nan], [1.0, 2.0], Effect(math.inf, "NaN")),
        ([math.inf, math.nan], [1.0, 2.0], Effect(math.inf, "NaN")),
        ([1.0, math.inf], [1.0, 2.0], Effect(math.inf, "infinity")),
        ([1.0, math.nan], [1.0, math.nan], Effect()),
        ([1.0, 2.0], [1.0, math.nan], Effect(math.inf, "a number")),
        ([1.0, math.inf], [1.0, math.nan], Effect()),
        ([0.0, 1.0], [0.0, 0.0], Effect(math.inf, "not zero")),
        ([0.0, 0.0], [0.0, 0.0], Effect()),
        ([3.0, 0.0], [4.0, 0.0], Effect(0.25)),
        (None, [4.0, 0.0], Effect(1.0, "nothing")),
    ],
)
def test_what_came_in_place_of_a_result_is_told_apart(
    got: list[float] | None, expected: list[float], effect: Effect
) -> None:
    there = {} if got is None else {"output": np.array(got)}
    wanted = {"output": np.array(expected)}
    assert excess(there, wanted, wanted) == effect


@pytest.mark.parametrize(
    ("got", "overflows", "effect"),
    [
        ([4.0, math.nan], [False, True], Effect()),
        ([math.nan, math.nan], [False, True], Effect(math.inf, "NaN")),
        ([math.nan, math.inf], [True, True], Effect(SMALL)),  # nothing to measure
        ([3.0, 0.0], [True, True], Effect(0.25)),  # numbers came: they are compared
    ],
)
def test_what_may_leave_the_range_need_not_be_a_number(
    got: list[float], overflows: list[bool], effect: Effect
) -> None:
    wanted = {"output": np.array([4.0, 0.0])}
    may = {"output": np.array(overflows)}
    assert excess({"output": np.array(got)}, wanted, wanted, may) == effect


def test_what_overflows_elsewhere_is_no_effect_of_a_wrong_cast() -> None:
    """Data up to 1e38, whose sums overflow whether the block with scale byte 0 is cast right or
    not."""
    spec = Spec(recipe="torchao.mxfp8.floor", backend="linear")
    case = Case(spec=spec, data=DataSpec(values="scale_ends", seed=6722))
    judge = Judge(recipes(), Ledger([]), select_arms(("eager",)))
    cause = next(v for v in judge.judge(case).causes if "scale byte 0" in v.symptom)
    evidence = observed(judge, case, cause)
    # which of the sums are NaN and which infinite goes by the order in which a CPU adds
    assert not np.isfinite(evidence.traces["eager"].outputs["output"]).all()
    effect = worst_of(evidence, cause)
    assert effect.share <= SMALL and effect.came == ""


@pytest.mark.parametrize("recipe", ["torch.bf16", "torchao.float8.rowwise"])
def test_whether_there_are_scales_and_what_the_backend_is_goes_with_it(recipe: str) -> None:
    judge, backend = Judge(recipes(), Ledger([])), recipes()[recipe].backends[0]
    case = Case(spec=Spec(recipe=recipe, backend=backend), data=DataSpec())
    seen = Verdict("O1", "eager", "output", "diverged", "differs on repeat")
    found = unconfirmed(judge, case, seen).finding
    assert found.scaled == (recipe != "torch.bf16")
    assert found.backend_words == recipes()[recipe].backend_words[backend] != ""
    left_alone = unconfirmed(judge, case, replace(seen, unconverted=True)).finding
    assert not left_alone.scaled, "a linear that conversion leaves alone has none either"


def test_a_recipe_that_says_what_backends_are_says_it_of_each() -> None:
    telling = [recipe for recipe in recipes().values() if recipe.backend_words]
    assert len(telling) > 10
    for recipe in telling:
        assert {*recipe.backends} <= recipe.backend_words.keys(), recipe.name
