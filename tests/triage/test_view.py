"""What a finding shows of its tensor: the guilty place, how far off it is, codes side by side."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike
from narrowfuzz.judge.judge import Judge, verdicts_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.compared import compared
from narrowfuzz.triage.effect import observed
from narrowfuzz.triage.finding import Finding, View
from narrowfuzz.triage.pair import Compared
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.view import BARS, CELLS, ELEMENTS, SHADES, binned, far, heat, view_of
from report.test_accepted import FINDING
from samples import recipes
from test_triage import Scripts

ROWWISE, MX = "torchao.float8.rowwise", "torchao.mxfp8.rceil"
EAGER = frozenset({"eager", "eager+checkpoint"})
SIZES: dict[str, Any] = {"m": 96, "k": 128, "n": 64}


@dataclass(frozen=True)
class Look:
    """A rule, what it finds, and the tensor that is then shown."""

    rule: str
    fault: str
    tensor: str
    shape: tuple[int, ...]
    recipe: str = ROWWISE
    spec: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule} {self.fault}"


LOOKS = [
    Look("O1", "gemm-races", "output", (96, 64)),
    Look("O2", "cast-truncates", "codes of the input", (96, 128)),
    Look("O3", "scale-doubled", "scale of the input", (96, 1)),
    Look("O3", "scale-through-bf16", "scale of the input", (),
         recipe="torchao.float8.tensorwise"),
    Look("O3", "mx-scale-byte-plus-one", "scale of the input", (96, 4), recipe=MX),
    Look("O4", "amax-ignores-negatives", "amax of the input", (96, 1)),
    Look("O5", "gemm-gain", "output", (96, 64)),
    Look("O5", "bias-forgotten", "output", (96, 64), spec={"bias": True}),
    Look("O5", "gemm-narrow-accumulator", "output", (96, 64), data={"regime": "lattice"}),
    Look("O13", "recompute-drifts", "codes of the input in the recompute", (96, 128),
         spec={"checkpoint": "full"}),
    Look("O13", "checkpoint-forgets-generator", "input", (96, 64), recipe="torch.fp32",
         spec={"model": "dropout", "checkpoint": "full"}),
    Look("O15", "gemm-loses-element", "grad_weight", (64, 128)),
    Look("O16", "bias-gradient-loses-row", "grad_bias", (64,), spec={"bias": True}),
]  # fmt: skip


def judged(look: Look) -> tuple[Verdict, Evidence]:
    """What the rule names first where it judges alone, and the run that shows it."""
    case = Case(spec=Spec(recipe=look.recipe, **(SIZES | look.spec)), data=DataSpec(**look.data))
    judge = Judge(recipes(), Ledger([]), EAGER)
    with builtin_faults()[look.fault].plant():
        verdict, *_ = judge.judge(case, [BY_NAME[look.rule]]).causes
        evidence = observed(judge, case, verdict)
    assert isinstance(evidence, Evidence)
    return verdict, evidence


@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_each_rule_shows_its_tensor(look: Look) -> None:
    verdict, evidence = judged(look)
    view = view_of(evidence, verdict)
    assert view is not None and (view.tensor, view.shape) == (look.tensor, look.shape)
    assert view.at == verdict.at.index and view.wrong and len(msgspec.json.encode(view)) < 40_000
    assert all(len(row) == len(view.rows[0]) <= CELLS for row in view.rows)
    assert view.rows[view.cell[0]][view.cell[1]] not in "0 "
    bins = view.bins
    assert bins.none + sum(bins.counts) + bins.infinite <= np.prod(look.shape)
    over = sum(bins.counts[-bins.first // bins.step :]) + bins.infinite
    assert view.exact or over == view.wrong
    assert not view.exact or sum(bins.counts) + bins.infinite == view.wrong
    assert bool(view.elements) == (bool(verdict.at.side) and len(view.elements) <= ELEMENTS)


CLEAN = Case(spec=Spec(recipe=ROWWISE, **SIZES), data=DataSpec())


def clean() -> Evidence:
    evidence = Judge(recipes(), Ledger([])).observe(CLEAN, EAGER, repeat=False)
    assert isinstance(evidence, Evidence)
    return evidence


def spoilt(rule: str, where: Any, value: float) -> View | None:
    """What the rule shows of a clean output with this value somewhere."""
    whole = clean()
    trace = whole.traces["eager"]
    output = trace.outputs["output"].copy()
    output[where] = value
    wrong = replace(whole, traces={"eager": replace(trace, outputs={"output": output})})
    verdict = next(v for v in verdicts_of(wrong, [BY_NAME[rule]]) if v.role == "output")
    return view_of(wrong, verdict)


@pytest.mark.parametrize("rule", ["O11", "O10", "O6", "O5"])
def test_a_nan_is_the_one_wrong_element(rule: str) -> None:
    view = spoilt(rule, (5, 3), np.nan)
    assert view is not None and (view.wrong, view.at, view.bins.infinite) == (1, (5, 3), 1)
    assert [row.count("x") for row in view.rows].index(1) == view.cell[0]


def test_a_guilty_row_is_the_darkest_row() -> None:
    view = spoilt("O5", 70, 1000.0)
    assert view is not None and view.at == (70, 0) and view.wrong == 64
    dark = [i for i, row in enumerate(view.rows) if str(SHADES) in row]
    assert dark == [view.cell[0]] == [70 * CELLS // 96]
    assert set(view.rows[dark[0]]) == {str(SHADES)}


def test_nothing_is_shown_of_what_is_sound_or_is_no_tensor() -> None:
    evidence = clean()
    for rule, what, side in (("O5", "result", ""), ("O2", "codes", "a"), ("O3", "scale", "a")):
        at = At(what=what, name="output", side=side, index=(0, 0))  # type: ignore[arg-type]
        made_up = Verdict(rule, "eager", "output", "diverged", at=at)
        assert compared(evidence, made_up) is not None and view_of(evidence, made_up) is None
    crash = Verdict("contract", "eager", "forward", "crashed", "fails")
    assert view_of(evidence, crash) is None
    nothing = np.zeros((60, 5))
    rows, cell = heat(nothing, (59, 4))
    assert rows == ("0" * 5,) * CELLS and cell == (CELLS - 1, 4)


def test_what_is_not_finite_and_what_is_not_judged_have_marks_of_their_own() -> None:
    got = np.array([[1.0, np.nan, np.inf, 3.0, np.nan]])
    expected = np.array([[1.0, np.nan, 2.0, 2.0, 0.0]])
    pair = Compared("output", "", got, expected, 0.5, "", skip=np.arange(5) == 4)
    error, share = far(pair)
    assert error.tolist()[0][:4] == [0.0, 0.0, np.inf, 1.0] and np.isnan(error[0, 4])
    rows, _ = heat(error, (0, 2))
    assert rows == (f"00x{SHADES} ",)
    assert binned(share).infinite == 1 and binned(share).none == 2


def test_each_shade_is_a_factor_less() -> None:
    error = np.array([[64.0, 17.0, 15.0, 4.5, 1e-9, 0.0]])
    assert heat(error, (0, 0))[0] == ("887710",)


def test_one_unit_is_below_the_line_and_more_is_above() -> None:
    bins = binned(np.array([0.0, 1.0, 1.0 + 2**-40, 2.0, 2.1]))
    assert (bins.none, bins.first, bins.step, bins.counts) == (1, -1, 1, (1, 2, 1))
    wide = binned(np.array([1e-30, 1.0, 1e30]))
    assert len(wide.counts) <= BARS and wide.first % wide.step == 0 and sum(wide.counts) == 3
    assert sum(wide.counts[: -wide.first // wide.step]) == 2


def test_codes_stand_beside_what_they_should_be() -> None:
    verdict, evidence = judged(LOOKS[1])
    view = view_of(evidence, verdict)
    assert view is not None
    bad = next(e for e in view.elements if e.index == verdict.at.index)
    assert bad.code != bad.wanted and bad.code.startswith("0x") and bad.scale == bad.wanted_scale
    verdict, evidence = judged(LOOKS[4])
    view = view_of(evidence, verdict)
    assert view is not None
    for element in view.elements:
        came, wanted = (int(text.removeprefix("byte ")) for text in
                        (element.scale, element.wanted_scale))  # fmt: skip
        assert came == wanted + 1


def test_a_late_element_is_among_those_that_are_told() -> None:
    """A NaN near the end of a long row."""
    data = {"values": "inf_nan", "spikes": (Spike("input", 3, 125, "0x7fc00000"),)}
    look = Look("O4", "cast-swallows-nan", "", (), data=data)
    verdict, evidence = judged(look)
    view = view_of(evidence, verdict)
    assert view is not None and view.bins.infinite == 1 and "x" in "".join(view.rows)
    assert {e.index[0] for e in view.elements} == {3} and len(view.elements) == ELEMENTS


def test_triage_keeps_the_view_of_the_case_as_it_was_drawn() -> None:
    spec = Spec(recipe=ROWWISE, backend="emulated", m=16, k=32, n=16)
    case, judge = Case(spec=spec, data=DataSpec(seed=3)), Judge(recipes(), Ledger([]), EAGER)
    with builtin_faults()["gemm-gain"].plant():
        verdict = next(v for v in judge.judge(case).causes if v.rule == "O5")
        done = triage(judge, case, verdict, seconds=3.0, plant=("", "gemm-gain"),
                      scripts=Scripts(True))  # fmt: skip
    finding = done.finding
    assert finding.minimal.spec.m < 16
    assert isinstance(finding.view, View) and finding.view.drawn
    assert finding.view.shape == (16, 16) and finding.view.wrong > 1


def test_a_finding_of_before_has_no_view() -> None:
    fields = msgspec.to_builtins(FINDING)
    del fields["view"]
    assert msgspec.convert(fields, Finding) == FINDING
