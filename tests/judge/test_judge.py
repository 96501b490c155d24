"""The judge on models: which verdict is the first cause, and when a ratio counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from kernels import skip_without_backend
from narrowfuzz.arms.program import Program
from narrowfuzz.case.events import Backward, Event, Forward
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.judge.fold import fold
from narrowfuzz.judge.judge import FRESH_DRAWS, Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.judge.programs import Programs
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.numerics.formats import F32
from narrowfuzz.plants.registry import builtin_faults, builtin_plants
from narrowfuzz.recipe.recipe import runnable
from narrowfuzz.rules import BY_NAME
from narrowfuzz.trace.address import At
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.layer import linear_of
from samples import every_recipe, of_operators, recipes

HERE = [name for name, recipe in recipes().items() if runnable(recipe, "cpu")]

ROWWISE, BF16 = "torchao.float8.rowwise", "torch.bf16"
CLIMB = Spec(recipe=BF16, model="mlp_gelu", checkpoint="full", compile="inductor")


def bad(rule: str, arm: str, role: str = "output", symptom: str = "wrong", **more: Any) -> Verdict:
    return Verdict(rule, arm, role, "diverged", symptom, At(**more))


def causes(*verdicts: Verdict) -> list[tuple[str, str]]:
    """(rule, arm) of the first causes; the order of the verdicts must not matter."""
    case = Case(spec=CLIMB, data=DataSpec())
    folded = [fold(case, "torch", order, True, known_as=lambda verdict: "").causes for order in
              (verdicts, verdicts[::-1])]  # fmt: skip
    names = [[(v.rule, v.arm) for v in found] for found in folded]
    assert names[0] == names[1]
    return names[0]


def test_each_consequence_knows_its_cause() -> None:
    """And what is sound, known, or a cause itself is none."""
    case = Case(spec=CLIMB, data=DataSpec())
    scale, result = bad("O3", "eager", layer="up"), bad("O6", "eager", layer="up")
    other = bad("O6", "eager", "grad_input", layer="down")
    sound = replace(bad("O2", "eager"), status="ok")
    judged = fold(case, "torch", [scale, result, other, sound], True, known_as=lambda v: "")
    assert judged.causes == (scale, other) and judged.consequences == ((result, scale),)
    known = fold(case, "torch", [scale, result], True, known_as=lambda verdict: "an-entry")
    assert not known.causes and not known.consequences


class TestFold:
    """Which of two verdicts is a consequence of which."""

    def test_a_rule_of_the_whole_run_is_one_cause_however_many_rungs_show_it(self) -> None:
        found = causes(
            bad("O8", "aot_eager+checkpoint"),
            bad("O8", "inductor_strict+checkpoint", role="grad_parameter"),
        )
        assert found == [("O8", "aot_eager+checkpoint")]

    def test_another_symptom_of_the_same_rule_is_another_cause(self) -> None:
        found = causes(
            bad("O9", "aot_eager+checkpoint"),
            bad("O9", "inductor+checkpoint", symptom="not finite"),
        )
        assert len(found) == 2

    def test_a_run_that_does_not_repeat_itself_explains_that_rungs_differences(self) -> None:
        repeat = bad("O1", "aot_eager+checkpoint", role="grad_input")
        assert causes(repeat, bad("O8", "aot_eager+checkpoint")) == [("O1", "aot_eager+checkpoint")]
        # but not those of a rung that does repeat itself
        assert len(causes(repeat, bad("O8", "inductor_strict+checkpoint", role="output"))) == 2

    @pytest.mark.parametrize("upstream", ["O13", "O18"])
    def test_a_wrong_recompute_explains_a_whole_run_on_the_same_rung(self, upstream: str) -> None:
        arm = "eager+checkpoint"
        assert causes(bad(upstream, arm), bad("O12", arm, role="grad_parameter")) == [
            (upstream, arm)
        ]

    def test_strictness_explains_the_ratio_and_not_the_other_way_round(self) -> None:
        arm = "aot_eager+checkpoint"
        assert causes(bad("O9", arm), bad("O8", arm, role="grad_input")) == [("O8", arm)]

    def test_a_layers_fault_is_not_the_excuse_of_another_layer(self) -> None:
        one, other = (bad(o, "eager", layer=n) for o, n in (("O3", "up"), ("O6", "down")))
        assert causes(one, other) == [("O3", "eager"), ("O6", "eager")]
        assert causes(one, replace(other, at=At(layer="up"))) == [("O3", "eager")]

    def test_a_layers_fault_in_eager_does_not_excuse_what_another_rung_makes_of_it(self) -> None:
        """Eager and the compiled rung share the fault, so a difference has a cause of its own."""
        layer = bad("O3", "eager", layer="up")
        assert causes(layer, bad("O8", "aot_eager+checkpoint")) == [
            ("O3", "eager"), ("O8", "aot_eager+checkpoint")
        ]  # fmt: skip

    def test_the_same_wrong_copy_of_the_same_weight_under_compile_is_the_same_cause(self) -> None:
        eager = bad("O3", "eager", layer="up", side="b")
        compiled = replace(eager, arm="aot_eager+checkpoint")
        assert causes(eager, compiled) == [("O3", "eager")]

    def test_on_ranks_a_known_gradient_explains_the_steps_of_its_parameter_alone(self) -> None:
        spec = Spec(recipe=BF16, steps=2, sharding=Sharding(tensor=2))
        gradient = bad("S1", "sharded", role="grad_parameter", name="proj.bias.grad@0")
        bias, weight = (
            bad("S1", "sharded", role="parameter", name=f"proj.{name}")
            for name in ("bias", "weight")
        )
        judged = fold(
            Case(spec=spec, data=DataSpec()), "torch", [gradient, bias, weight], True,
            known_as=lambda verdict: "an-entry" if verdict == gradient else "",
        )  # fmt: skip
        assert judged.causes == (weight,)
        assert [v.explained_by for v in judged.verdicts] == ["an-entry", "an-entry", ""]

    def test_a_crash_explains_its_own_rung_only(self) -> None:
        crash = replace(bad("contract", "aot_eager+checkpoint", role="forward"), status="crashed")
        assert causes(crash, bad("O5", "aot_eager+checkpoint")) == [
            ("contract", "aot_eager+checkpoint")
        ]
        assert len(causes(crash, bad("O8", "inductor_strict+checkpoint"))) == 2

    def test_what_is_no_divergence_is_no_cause(self) -> None:
        quiet: tuple[Any, ...] = ("ok", "inconclusive", "not_applicable", "unsupported")
        assert not causes(*(replace(bad("O8", "aot_eager+checkpoint"), status=s) for s in quiet))


@pytest.mark.parametrize(
    ("fault", "rule"), [("scale-doubled", "O3"), ("cast-truncates", "O2")]
)  # fmt: skip
def test_a_quantisers_fault_in_a_model_is_one_finding_on_all_rungs(fault: str, rule: str) -> None:
    spec = Spec(recipe=ROWWISE, model="mlp_gelu", k=32, n=64, compile="aot_eager")
    found: set[str] = set()
    with builtin_faults()[fault].plant():
        judge = Judge(recipes(), Ledger([]), frozenset({"eager", "aot_eager"}))
        for seed in range(2):
            judgement = judge.judge(Case(spec=spec, data=DataSpec(seed=seed)))
            found |= {fingerprint(v, judgement.family) for v in judgement.causes}
            arms = {v.arm for v in judgement.verdicts if v.rule == rule and v.status != "ok"}
            assert "aot_eager" in arms, "the copy under compile is judged, and folded"
    assert {tuple(f.split("--")[:3]) for f in found} == {(rule, "operand", "eager")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", ["mlp_swiglu", "llama_block", "tied_embedding", "used_twice"])
@pytest.mark.parametrize("focus", [None, 1])
def test_a_clean_model_is_judged_at_its_layers_and_nothing_is_found(
    model: Any, focus: int | None
) -> None:
    spec = Spec(recipe=ROWWISE, model=model, k=32, n=64, checkpoint="full")
    judge = Judge(recipes(), of_operators(), frozenset({"eager", "eager+checkpoint"}))
    judgement = judge.judge(Case(spec=spec, data=DataSpec(seed=1)), focus=focus)
    assert not [v.sentence() for v in judgement.causes]
    layers = {v.at.layer for v in judgement.verdicts if v.at.layer and v.status == "ok"}
    quantisers = {v.rule for v in judgement.verdicts if v.at.layer and v.status == "ok"}
    assert {"O2", "O3", "O4", "O5", "O15"} <= quantisers
    if focus is None:
        assert len(layers) == {"mlp_swiglu": 3, "llama_block": 7, "tied_embedding": 2}.get(model, 1)
    assert {v.rule for v in judgement.verdicts if v.status == "ok"} >= {"O1", "O12", "contract"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("model", ["linear", "mlp_gelu"])
@pytest.mark.parametrize("recipe", sorted(HERE))
def test_without_a_backward_every_rule_still_has_an_answer(
    recipe: str, model: Any, mode: Any
) -> None:
    dtype = recipes()[recipe].dtypes[0]
    spec = Spec(recipe=recipe, model=model, m=31, grad_mode=mode, dtype=dtype)
    skip_without_backend(spec)
    judgement = Judge(recipes(), Ledger([]), frozenset({"eager"})).judge(
        Case(spec=spec, data=DataSpec())
    )
    judged = {v.rule for v in judgement.verdicts if v.status == "ok"}
    assert judged >= {"contract", "O1"} or not judgement.ran
    assert judgement.ran or mode == "inference"  # torchao's tensors refuse a view there
    assert not [v for v in judgement.verdicts if v.rule in ("O15", "R22") and v.status == "ok"]


class _Skewed(Programs):
    """Programs whose compiled runs are far off for those data whose turn it is."""

    def __init__(self, wrong: Callable[[int], bool]) -> None:
        super().__init__(recipes(), "cpu")
        self.wrong, self.runs = wrong, 0

    def tapped(
        self, program: Program, tensors: dict[str, F32], spec: Spec, focus: int | None
    ) -> Trace:
        trace = super().tapped(program, tensors, spec, focus)
        if not program.arm.compiler:
            return trace
        self.runs += 1
        if not self.wrong(self.runs):
            return trace
        outputs = {name: t + 10 * np.abs(t).max() for name, t in trace.outputs.items()}
        return replace(trace, outputs=outputs)


def skewed(wrong: Callable[[int], bool]) -> tuple[Judge, _Skewed]:
    arms = frozenset({"eager", "aot_eager_decomp_partition"})
    judge = Judge(recipes(), Ledger([]), arms)
    judge.programs = programs = _Skewed(wrong)
    return judge, programs


RATIO_CASE = Case(
    spec=Spec(recipe=BF16, model="mlp_gelu", compile="aot_eager_decomp_partition"),
    data=DataSpec(seed=2),
)


def test_a_ratio_that_every_fresh_draw_shows_is_a_cause() -> None:
    judge, programs = skewed(lambda run: True)
    (cause,) = judge.judge(RATIO_CASE, [BY_NAME["O9"]]).causes
    assert (cause.rule, cause.symptom) == ("O9", "error beyond eager's")
    assert programs.runs == 1 + FRESH_DRAWS


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clean", [2, 5, 1 + FRESH_DRAWS])
def test_a_ratio_that_one_fresh_draw_does_not_show_is_inconclusive(clean: int) -> None:
    judge, programs = skewed(lambda run: run != clean)
    judgement = judge.judge(RATIO_CASE, [BY_NAME["O9"]])
    assert not judgement.causes
    assert [v.status for v in judgement.verdicts] == ["inconclusive"]
    assert programs.runs == clean  # the first draw that does not show it ends the search


def test_unconfirmed_ratios_count_where_nobody_asks_for_more() -> None:
    judge, programs = skewed(lambda run: True)
    assert judge.judge(RATIO_CASE, [BY_NAME["O9"]], confirm=False).causes
    assert programs.runs == 1


def test_an_exact_rules_divergence_needs_no_other_draws() -> None:
    judge, programs = skewed(lambda run: True)
    spec = msgspec.structs.replace(RATIO_CASE.spec, model="frozen_first")
    case = msgspec.structs.replace(RATIO_CASE, spec=spec)
    assert [v.rule for v in judge.judge(case, [BY_NAME["O8"]]).causes] == ["O8"]
    assert programs.runs == 1


def test_a_layer_is_what_a_models_linear_was_and_got() -> None:
    case = Case(spec=Spec(recipe=ROWWISE, model="mlp_gelu", m=16, k=32, n=48), data=DataSpec())
    judge = Judge(recipes(), Ledger([]))
    found = linear_of(judge, case, "down")
    assert found is not None
    spec, tensors = found
    assert spec == Spec(recipe=ROWWISE, m=16, k=48, n=32)
    assert {n: t.shape for n, t in tensors.items()} == {
        "input": (16, 48), "weight": (32, 48), "grad_output": (16, 32)
    }  # fmt: skip
    drawn = tensors_of(case, recipes()[ROWWISE])
    assert np.array_equal(tensors["weight"], drawn["down.weight"])
    assert np.array_equal(tensors["grad_output"], drawn["grad_output"])
    assert linear_of(judge, case, "nowhere") is None


def test_a_layers_last_call_is_told_from_its_first() -> None:
    spec = Spec(recipe=ROWWISE, model="used_twice", m=16, k=32, n=32, dtype="fp32")
    case, judge = Case(spec=spec, data=DataSpec()), Judge(recipes(), Ledger([]))
    first, last = linear_of(judge, case, "proj"), linear_of(judge, case, "proj", 1)
    assert first is not None and last is not None
    assert (first[1]["input"] < 0).any()
    assert (last[1]["input"] >= 0).all(), "it comes out of a relu"


def test_what_blocks_do_not_divide_and_runs_is_a_finding() -> None:
    case = Case(spec=Spec(recipe="torchao.mxfp8.rceil", k=40), data=DataSpec())
    with builtin_faults()["mx-ragged-block-dropped"].plant():
        (cause,) = Judge(recipes(), Ledger([]), frozenset({"eager"})).judge(case).causes
    assert (cause.rule, cause.symptom) == ("contract", "accepts what its blocks do not divide")


def test_a_relation_of_a_dynamic_case_runs_on_its_own_rows() -> None:
    """One graph serves many row counts; run eagerly, a program of other rows is another one."""
    judge = Judge(recipes(), Ledger([]), frozenset({"eager"}))
    for rows in (4, 1):
        spec = Spec(recipe="torch.fp32", dtype="fp32", m=rows, k=16, n=16, dynamic=True)
        judged = judge.judge(Case(spec=spec, data=DataSpec()), (BY_NAME["R18"], BY_NAME["R20"]))
        assert not judged.causes
        assert any(v.status == "ok" for v in judged.verdicts)


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_without_a_backward_the_forward_is_judged(mode: Any) -> None:
    spec = Spec(recipe="torchao.float8.tensorwise", grad_mode=mode, m=32, k=32, n=64)
    judged = Judge(recipes(), load_ledger()).judge(Case(spec=spec, data=DataSpec(seed=3)))
    for rule in ("O2", "O3", "O4", "O5", "O6"):
        status = {v.status for v in judged.verdicts if v.rule == rule and v.role == "output"}
        assert status == {"ok"}, rule


def test_a_second_judgement_sees_what_the_first_saw() -> None:
    """A race shows on every judgement of a case: nothing is left out the second time."""
    case = Case(spec=Spec(recipe="torchao.float8.rowwise"), data=DataSpec(seed=1))
    judge = Judge(recipes(), Ledger([]))
    with builtin_faults()["gemm-races"].plant():
        first, second = (judge.judge(case).fingerprints() for _ in range(2))
    assert first == second and any(name.startswith("O1--") for name in first)


def test_whether_to_repeat_is_the_callers_choice() -> None:
    case = Case(spec=Spec(recipe="torchao.float8.rowwise"), data=DataSpec(seed=1))
    with builtin_faults()["gemm-races"].plant():
        judgement = Judge(recipes(), Ledger([])).judge(case, repeat=False)
    assert not any(v.rule == "O1" and v.status in ("ok", "diverged") for v in judgement.verdicts)


def test_what_is_looked_at_does_not_hang_on_the_data_seed() -> None:
    """Minimising over seeds must not change which layer, which recipe or which product it is."""
    judge = Judge(recipes(), Ledger([]))
    for spec in (
        Spec(recipe="torchao.float8.rowwise", model="mlp_swiglu"),
        Spec(recipe="torchao.float8.rowwise"),
    ):
        seen = set()
        for seed in range(4):
            judgement = judge.judge(Case(spec=spec, data=DataSpec(seed=seed)), focus=1)
            looked = {(v.rule, v.at.layer) for v in judgement.verdicts if v.at.layer}
            seen.add(frozenset(looked))
        assert len(seen) == 1


def test_an_unwritten_result_is_seen_although_memory_held_the_right_one() -> None:
    """A kernel that writes nothing returns what was there: the result of the run before."""
    case = Case(spec=Spec(recipe="torch.scaled_mm", k=0, m=2, n=3), data=DataSpec())
    skip_without_backend(case.spec)
    judge = Judge(recipes(), Ledger([]))
    assert not any("O1" in name for name in judge.judge(case).fingerprints())
    with builtin_faults()["empty-gemm-unwritten"].plant():
        found = judge.judge(case).fingerprints()
    assert "O1--output--eager--depends on memory that nobody wrote--torch.scaled_mm" in found


def test_a_case_that_a_relation_runs_is_announced_before_it_runs() -> None:
    run: list[Case] = []
    judge = Judge(recipes(), Ledger([]), before_rerun=run.append)
    case = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
    judge.judge(case)
    assert {other.data for other in run} == {case.data}
    assert {other.spec for other in run} - {case.spec}


ONE_STEP: tuple[Event, ...] = (Forward(), Backward(of=(0,)))
#: Recipe, model, and what is said of the two.
STRANGERS = [
    (BF16, "library_linear", f"{BF16} converts models, and library_linear is a library's own"),
    (ROWWISE, "library_layernorm_mlp",
     f"{ROWWISE} converts models, and library_layernorm_mlp is a library's own"),
    *(("reference.delayed", model,
       f"reference.delayed does not carry model {model!r} here (models: library_linear)")
      for model in ("linear", "library_layernorm_mlp")),
]  # fmt: skip


@pytest.mark.parametrize("events", [(), ONE_STEP], ids=("steps", "events"))
@pytest.mark.parametrize(("name", "model", "says"), STRANGERS)
def test_a_recipe_refuses_what_it_has_no_model_for(
    name: str, model: Any, says: str, events: tuple[Event, ...]
) -> None:
    """A converting recipe the layers of a library, a library's recipe all but its own."""
    judge = Judge(every_recipe(), Ledger([]))
    case = Case(spec=Spec(recipe=name, model=model, events=events), data=DataSpec())
    after = Case(spec=Spec(recipe=BF16), data=DataSpec(), history=(case,))
    asked: tuple[Callable[[], Any], ...] = (
        lambda: judge.recipe(case.spec).check(case.spec),
        lambda: judge.observe(case),
        lambda: judge.judge(case),
        lambda: judge.run_arms(case),
        lambda: judge.judge(after),
    )
    for ask in asked:
        with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
            ask()
        assert str(refused.value) == says


@pytest.mark.parametrize(("changes", "events"), [({}, 2), ({"steps": 2, "microbatches": 2}, 10)])
def test_plain_steps_of_a_librarys_layers_are_judged_event_by_event(
    changes: dict[str, int], events: int
) -> None:
    spec = Spec(recipe="reference.delayed", model="library_linear", **changes)  # type: ignore[arg-type]
    judge, case = Judge(every_recipe(), Ledger([])), Case(spec=spec, data=DataSpec())
    evidence = judge.observe(case)
    assert len(evidence.spec.events) == len(evidence.traces["eager"].moments) == events
    judgement = judge.judge(case)
    assert judgement.ran and not judgement.causes


def test_a_call_that_is_forbidden_has_no_float64_twin() -> None:
    """In float64 torch may raise the error that it does not raise otherwise."""
    case = Case(
        spec=Spec(recipe="torch.fp32", dtype="fp32", model="sdpa_mask_and_causal", k=16, n=8),
        data=DataSpec(),
    )
    evidence = Judge(recipes(), Ledger([])).observe(case)
    assert evidence.twin is None


def test_operands_that_overflow_when_dequantised_are_not_judged_by_their_product() -> None:
    """A scale that is one too large makes 2^128 of the largest fp32 number: that is the scale's
    fault, and of what is multiplied by infinity nothing is known."""
    text = {
        "spec": {"recipe": "torchao.mxfp8.floor", "backend": "linear"},
        "data": {
            "seed": 38698,
            "spikes": [{"tensor": "input", "row": 5, "col": 50, "bits": "0x7f7fffff"}],
        },
        "schema": 6,
    }
    case = load_case(msgspec.json.encode(text))
    with builtin_plants()["mx-scale-byte-plus-one"].plant():
        judgement = Judge(every_recipe(), load_ledger()).judge(case)
    diverged = {verdict.rule for verdict in judgement.verdicts if verdict.status == "diverged"}
    assert "O3" in diverged and not {"O5", "O15"} & diverged
