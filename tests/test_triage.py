"""What is seen is shown first, as it was drawn, and then made smaller."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrowfuzz.arms.ladder import select_arms
from narrowfuzz.case import Case, DataSpec, Spec
from narrowfuzz.judge import Judge
from narrowfuzz.ledger import Ledger
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe import load_recipes
from narrowfuzz.severity import SMALL
from narrowfuzz.triage.effect import effect_of, observed
from narrowfuzz.triage.finding import Triaged
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import ScriptRun
from narrowfuzz.verdict import BAD, Verdict

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
    return next(v for v in judge.judge(CASE).causes if v.oracle == "O5")


def triaged(scripts: Scripts) -> tuple[Triaged, list[Triaged]]:
    """The finding, and what was told before it."""
    judge = Judge(load_recipes(), Ledger([]), select_arms(()))
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
    judge = Judge(load_recipes(), Ledger([]), select_arms(()))
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


def test_what_has_no_plan_has_an_effect_too() -> None:
    """MXFP8 that takes a dimension of no whole blocks: nothing says what it should have been."""
    spec = Spec(recipe="torchao.mxfp8.rceil_wgrad_with_hp", m=159, k=129, n=64)
    case = Case(spec=spec, data=DataSpec(seed=3))
    judge = Judge(load_recipes(), Ledger([]), select_arms(("eager",)))
    with builtin_faults()["mx-ragged-block-dropped"].plant():
        (cause,) = judge.judge(case).causes
        assert effect_of(observed(judge, case, cause), cause) == SMALL
