"""Which passes could not have failed, and that what is asked of a pass is fair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from narrowfuzz.arms.event_records import see_cast
from narrowfuzz.case.kind import LAYERS, LINEAR
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.cli import main
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics.formats import E4M3FN, E5M2, FORMATS, Format, decode, round_to
from narrowfuzz.play.library import Cast
from narrowfuzz.power import falsify, reads, schedules
from narrowfuzz.power.perturbation import outputs
from narrowfuzz.power.probe import Passes
from narrowfuzz.power.report import print_vacuity, vacuity_json
from narrowfuzz.power.vacuity import drawn, measure, passes
from narrowfuzz.report.terminal import console
from narrowfuzz.rules import BY_NAME, RULES, rules_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import Rule, plain
from narrowfuzz.trace.snapshots import ExecutionPoint
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict
from samples import every_recipe

ROWWISE = "torchao.float8.rowwise"
CASE = Case(spec=Spec(recipe=ROWWISE, bias=True, checkpoint="full"), data=DataSpec(seed=3))


@cache
def judge() -> Judge:
    return Judge(every_recipe(), Ledger([]))


def content(evidence: Evidence) -> bytes:
    """Everything that was observed and that is expected, as bytes."""
    arrays = [*evidence.tensors.values()]
    for trace in evidence.traces.values():
        arrays += trace.outputs.values()
        for site in trace.sites:
            seen = (site.a, site.b)
            arrays += (
                x for s in seen for x in (s.codes, s.scale, s.amax, s.values) if x is not None
            )
    return b"".join(x.tobytes() for x in arrays)


class TestProbe:
    def test_a_rule_that_always_passes_is_vacuous(self) -> None:
        def content_with_all(evidence: Evidence) -> Iterator[Verdict]:
            yield from (plain("always", arm, "output", "ok") for arm in evidence.traces)

        always = Rule(
            "exact", "always", content_with_all, reads=("results", "operands", "scales"),
        )  # fmt: skip
        found = list(passes(judge(), CASE, [always]))
        assert [one.arm for one in found] == ["eager", "eager+checkpoint"]
        assert all(one.vacuous and len(one.tried) == 10 for one in found)

    def test_a_rule_that_compares_bits_is_not(self) -> None:
        sharp = [BY_NAME[name] for name in ("O1", "O2", "O3", "O4", "O12", "R1", "R18")]
        found = list(passes(judge(), CASE, sharp))
        assert {one.rule for one in found} == {rule.name for rule in sharp}
        assert not any(one.vacuous for one in found)
        assert all(one.noticed == one.tried for one in found if one.rule in ("O1", "O12", "R1"))

    def test_a_rule_that_looks_at_one_result_of_three_is_asked_of_that_one(self) -> None:
        def first_only(evidence: Evidence) -> Iterator[Verdict]:
            for role in ("output", "grad_input"):
                got = evidence.traces["eager"].outputs.get(role)
                fine = role == "grad_input" or got is None or got.any()
                yield plain("first", "eager", role, "ok" if fine else "diverged")

        half = Rule("exact", "first", first_only)
        found = {one.role: one for one in passes(judge(), CASE, [half])}
        assert found["output"].noticed == {"zeros (results)"}
        assert found["grad_input"].vacuous

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("values", ["zero_rows", "subnormal", "near_max"])
    def test_every_rule_could_have_failed_where_it_passed(self, values: str) -> None:
        spec = Spec(recipe=ROWWISE, m=32, k=48, n=32, bias=True, checkpoint="full", batch=2)
        case = Case(spec=spec, data=DataSpec(values=values, seed=1))  # type: ignore[arg-type]
        found = list(passes(judge(), case, tuple(rules_of(case.spec).values())))
        assert len({one.rule for one in found}) > 10
        assert [one for one in found if one.vacuous] == []

    def test_what_was_observed_and_what_is_expected_stay_as_they_were(self) -> None:
        evidence = judge().observe(CASE)
        before = content(evidence)
        reference = evidence.reference
        expected = reference.operand("output", "a").quantised
        assert expected is not None
        codes = expected.codes.copy()
        for perturbations in reads.FALSIFIES.values():
            for perturbation in perturbations:
                other = perturbation.change(evidence, "eager")
                if other is not None:
                    assert other is not evidence and other.reference is reference
                    assert other.tensors is evidence.tensors
        assert content(evidence) == before
        assert np.array_equal(expected.codes, codes)


def test_every_rule_has_perturbations() -> None:
    for kind, falsifies in ((LINEAR, reads.FALSIFIES), (LAYERS, schedules.FALSIFIES)):
        told = {read for rule in RULES if kind in rule.cases for read in rule.reads}
        assert told == set(falsifies)


class TestFalsify:
    @pytest.mark.parametrize("fmt", [E4M3FN, E5M2, FORMATS["e2m1"]], ids=lambda f: f.name)
    def test_one_code_up_is_the_next_larger_value(self, fmt: Format) -> None:
        every = np.arange(1 << fmt.bits, dtype=fmt.code_dtype)
        twice = np.stack([every, every], axis=1)  # on a chessboard, half of them stay
        value, up = decode(twice, fmt), decode(falsify.one_code_up(twice, fmt), fmt)
        even = np.indices(twice.shape).sum(axis=0) % 2 == 0
        assert np.array_equal(up[~even], value[~even], equal_nan=True)
        finite = even & np.isfinite(value)
        top = finite & (value == fmt.max)
        assert (up[finite & ~top] > value[finite & ~top]).all() and (up[top] < value[top]).all()
        assert not np.isfinite(up[even & ~np.isfinite(value)]).any()
        steps = np.unique(value[np.isfinite(value)])
        at = np.searchsorted(steps, value[finite & ~top])
        skipped = np.searchsorted(steps, up[finite & ~top]) - at
        assert (skipped <= 2).all()  # two only where -0 and +0 lie in between

    def test_a_stale_scale_is_another_scale(self) -> None:
        for scale in (
            np.float32([1.0, np.nan, np.inf, 0.0, 3e38]),
            np.uint8([0, 127, 253, 254, 255]),
        ):
            stale = falsify.stale_scale(scale)
            assert stale.dtype == scale.dtype and (stale != scale).all()
            assert np.isfinite(stale.astype(np.float32)).all()

    def test_results_of_a_run_that_failed_are_not_there_to_falsify(self) -> None:
        plan = every_recipe()[ROWWISE].plan(CASE.spec)
        assert outputs(falsify.NUMBERS[0], Trace("eager"), plan) is None


class TestRepaired:
    """Passes that were none: the rule says so now, and finds what it found before."""

    def evidence(self, **data: object) -> Evidence:
        spec = Spec(recipe="torch.fp32", dtype="fp32", m=4, k=4, n=4, bias=True)
        return judge().observe(Case(spec=spec, data=DataSpec(**data)))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("rule", "role"), [("O5", "output"), ("O6", "grad_weight"), ("O16", "grad_bias")]
    )
    def test_a_result_of_zeros(self, rule: str, role: str) -> None:
        evidence = self.evidence()
        tensors = {name: np.zeros_like(x) for name, x in evidence.tensors.items()}
        eager = evidence.traces["eager"]
        zeros = replace(eager, outputs={n: np.zeros_like(x) for n, x in eager.outputs.items()})
        nothing = replace(evidence, tensors=tensors, traces={"eager": zeros})
        assert self.status(rule, role, nothing) == "inconclusive"
        ones = replace(eager, outputs={n: np.ones_like(x) for n, x in eager.outputs.items()})
        assert self.status(rule, role, replace(nothing, traces={"eager": ones})) == "diverged"
        assert self.status(rule, role, evidence) == "ok"

    def status(self, rule: str, role: str, evidence: Evidence) -> str:
        return next(v.status for v in BY_NAME[rule].check(evidence) if v.role == role)

    def test_nan_where_any_sum_may_overflow(self) -> None:
        assert self.status("O11", "output", self.evidence(values="near_max")) == "inconclusive"
        assert self.status("O11", "output", self.evidence()) == "ok"

    def test_codes_under_nan_scales_only(self) -> None:
        spec = Spec(recipe="torchao.mxfp8.ceil", m=32, k=32, n=32)
        evidence = judge().observe(Case(spec=spec, data=DataSpec()))
        assert self.status("O2", "output", evidence) == "ok"
        nan = {**evidence.tensors, "input": np.full((32, 32), np.nan, np.float32)}
        assert evidence.rerun is not None
        after = evidence.rerun(nan, spec, "")
        wrong = replace(evidence, tensors=nan, traces={"eager": after})
        assert self.status("O2", "output", wrong) == "inconclusive"

    def test_amax_and_runs_of_zeros(self) -> None:
        evidence = judge().observe(CASE)
        tensors = {name: np.zeros_like(x) for name, x in evidence.tensors.items()}
        assert evidence.rerun is not None
        zeros = evidence.rerun(tensors, CASE.spec, "")
        both = {"eager": zeros, "eager+checkpoint": replace(zeros, arm="eager+checkpoint")}
        nothing = replace(evidence, tensors=tensors, traces=both)
        for rule in ("O4", "O12"):
            assert self.status(rule, "output", evidence) == "ok"
            assert self.status(rule, "output", nothing) == "inconclusive"

    def test_a_bias_that_swallows_the_result(self) -> None:
        spec = Spec(recipe=ROWWISE, dtype="fp32", bias=True)
        for values, want in (("gaussian", "ok"), ("subnormal", "inconclusive")):
            case = Case(spec=spec, data=DataSpec(values=values))  # type: ignore[arg-type]
            assert self.status("R19", "output", judge().observe(case)) == want

    def test_a_recomputed_layer_that_got_nothing_but_zeros(self) -> None:
        spec = Spec(recipe="torch.bf16", model="mlp_gelu", checkpoint="full")
        evidence = judge().observe(Case(spec=spec, data=DataSpec()))
        assert {v.status for v in BY_NAME["O13"].check(evidence)} == {"ok"}
        arm = "eager+checkpoint"
        calls = tuple(
            replace(c, tensors={**c.tensors, "input": np.zeros_like(c.tensors["input"])})
            for c in evidence.traces[arm].calls
        )
        nothing = {arm: replace(evidence.traces[arm], calls=calls)}
        found = [v.status for v in BY_NAME["O13"].check(replace(evidence, traces=nothing))]
        assert set(found) == {"ok", "inconclusive"}

    def test_granules_of_one_element_are_in_any_order(self) -> None:
        spec = Spec(recipe=ROWWISE, m=32, k=32, n=1)
        evidence = judge().observe(Case(spec=spec, data=DataSpec()))
        assert self.status("R13", "output", evidence) == "ok"
        assert self.status("R13", "grad_input", evidence) == "not_applicable"


class TestBlocks:
    """The casts of MXFP8 are held to the rule."""

    def raw(self, fmt: str, columns: bool) -> Cast:
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
        x[3, 5], x[40, 7], x[0, :32] = float("inf"), float("nan"), 0.0
        blocked = (x.T if columns else x).numpy()
        numbers = FORMATS["e4m3fn" if fmt == "e4m3" else "e5m2"]
        amax = np.nan_to_num(np.abs(blocked), nan=0.0, posinf=np.inf).reshape(len(blocked), -1, 32)
        # by the definition: the smallest power of two under which the largest number fits
        with np.errstate(divide="ignore"):
            exponent = np.ceil(np.log2(amax.max(axis=2).astype(np.float64) / numbers.max))
        byte = np.clip(exponent, -127, 127) + 127
        scaled = blocked / np.repeat(np.exp2(byte - 127), 32, axis=1)
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt]
        rounded = torch.from_numpy(round_to(scaled, numbers))
        codes, scale = rounded.to(dtype).view(torch.uint8), torch.from_numpy(byte.astype(np.uint8))
        if columns:
            codes, scale = codes.T.contiguous(), scale.T.contiguous()
        return Cast(None, x, codes, scale, fmt)

    @pytest.mark.parametrize("columns", [False, True])
    @pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
    def test_right_casts_are_exact_and_wrong_ones_are_not(self, fmt: str, columns: bool) -> None:
        raw = self.raw(fmt, columns)
        assert see_cast(raw, ExecutionPoint("forward")).wrong is None
        codes, scale = raw.codes.clone(), raw.scale.clone()
        codes[20, 20] ^= 1
        scale[1, 1] += 1
        assert see_cast(raw._replace(codes=codes), ExecutionPoint("forward")).wrong is not None
        assert see_cast(raw._replace(scale=scale), ExecutionPoint("forward")).wrong is not None


def test_a_measurement_counts_every_pass_and_can_be_repeated() -> None:
    recipes = [every_recipe()["torch.bf16"], every_recipe()["reference.delayed"]]
    found = measure(judge(), recipes, cases=4, seed=1)
    assert {recipe for _, recipe in found} == {"torch.bf16", "reference.delayed"}
    assert found["contract", "torch.bf16"].number >= 4
    assert found["O14", "reference.delayed"].vacuous == 0
    again = measure(judge(), recipes, cases=4, seed=1)
    assert {k: (t.number, t.vacuous) for k, t in found.items()} == {
        k: (t.number, t.vacuous) for k, t in again.items()
    }


def test_cases_are_as_many_as_were_asked_for() -> None:
    rowwise = every_recipe()[ROWWISE]
    cases = [case for case, _ in drawn(rowwise, 8, "1", "none")]
    assert len(cases) == 8 and all(case.spec.recipe == ROWWISE for case in cases)


def test_the_table_names_what_is_vacuous(capsys: pytest.CaptureFixture[str]) -> None:
    mute = Passes(number=4, vacuous=1)
    mute.tried["zeros (results)"], mute.missed["zeros (results)"] = 4, 3
    mute.examples.append((CASE, "eager", "output", ""))
    found = {("O5", ROWWISE): mute, ("O6", ROWWISE): Passes(number=10)}
    print_vacuity(console(), found)
    told = capsys.readouterr().out
    assert "25.0%" in told and "zeros (results) 75 %" in told and told.count(ROWWISE) == 1
    first = json.loads(json.dumps(vacuity_json(found)))[0]
    assert first["rule"] == first["oracle"] == "O5" and first["share"] == 0.25
    assert first["examples"][0]["case"]["spec"]["recipe"] == ROWWISE


def test_the_command_prints_a_table_and_writes_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "vacuity.json"
    with pytest.raises(SystemExit, match="0"):
        main(["vacuity", "--cases", "2", "--recipe", "torch.bf16", "--json", str(out)])
    assert "contract" in capsys.readouterr().out
    assert {entry["recipe"] for entry in json.loads(out.read_bytes())} == {"torch.bf16"}
    for wrong in (("--recipe", "torch.bf61"), ("--compile", "inductr")):
        with pytest.raises(SystemExit, match="2"):
            main(["vacuity", *wrong])
        assert "did you mean" in capsys.readouterr().err
