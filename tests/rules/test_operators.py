"""Calls of operators inside models: which are judged, where they are, what they explain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_entries
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.operators import BY_KERNEL, BY_NAME
from narrowfuzz.operators.operator import Expected, Operator, Read
from narrowfuzz.own_models import register
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.play.literal import laid
from narrowfuzz.rules import BY_NAME as BY_RULE
from narrowfuzz.rules.causes import root_of
from narrowfuzz.rules.contract import check_contract
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.address import At, parse
from narrowfuzz.trace.trace import OperatorCall, RunError, Trace
from narrowfuzz.trace.verdict import BAD, Verdict
from narrowfuzz.triage.needs import needs_of
from narrowfuzz.triage.script.operator import call_of, of_operator
from narrowfuzz.triage.script.short import write_short_script
from narrowfuzz.triage.verify import RunScript
from samples import every_recipe, of_operators

FAULTS = ("sum-in-narrow-dtype", "sum-drops-last-row")


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    return every_recipe()


def case_of(model: str, dtype: str = "fp32", seed: int = 0, **more: Any) -> Case:
    fields = {"m": 33, "k": 64, "n": 64, "heads": 2, "bias": True, **more}
    spec = Spec(recipe=f"torch.{dtype}", model=model, dtype=dtype, **fields)  # type: ignore[arg-type]
    return Case(spec=spec, data=DataSpec(seed=seed))


def judge_of(recipes: dict[str, Any], *arms: str) -> Judge:
    return Judge(recipes, of_operators(), arms=frozenset(arms or ("eager",)))


def test_every_operator_is_found_by_its_name_and_kernels() -> None:
    assert {operator.name for operator in BY_NAME.values()} == {*BY_NAME} >= {"sum"}
    assert BY_KERNEL["aten::sum.dim_IntList"] is BY_NAME["sum"]
    assert len(BY_KERNEL) == sum(len(operator.kernels) for operator in BY_NAME.values())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("model", "dtype"), [("llama_block", "bf16"), ("mlp_swiglu", "fp32")])
def test_a_wrong_sum_is_the_one_cause(
    recipes: dict[str, Any], fault: str, model: str, dtype: str
) -> None:
    case = case_of(model, dtype)
    clean = judge_of(recipes).judge(case)
    assert not clean.causes
    assert any((v.rule, v.status) == ("O25", "ok") for v in clean.verdicts)
    with builtin_faults()[fault].plant():
        (cause,) = judge_of(recipes).judge(case).causes
    assert (cause.rule, cause.role, cause.unconverted) == ("O25", "sum", True)
    assert "torch.sum over dim 0 of a " in cause.sentence()


def test_a_sum_in_a_backward_is_known_by_the_gradient_that_it_gives(
    recipes: dict[str, Any],
) -> None:
    evidence: Any = judge_of(recipes).observe(case_of("mlp_swiglu"))
    with builtin_faults()["sum-drops-last-row"].plant():
        judgement = judge_of(recipes).judge(case_of("mlp_swiglu"), [BY_RULE["O25"]])
    layers = {v.at.layer for v in judgement.verdicts if v.status in BAD}
    assert layers == {"w1", "w2", "w3"}
    calls = evidence.traces["eager"].operators
    assert {call.phase for call in calls if call.operator == "sum"} == {"backward"}


def test_a_mode_is_entered_at_the_first_draw_and_for_attention_at_every_fourth(
    recipes: dict[str, Any],
) -> None:
    judge = judge_of(recipes)
    for model, want in (
        ("mlp_swiglu", [True, False, False, False, False, False]),
        ("llama_block", [True, True, False, False, False, True]),
    ):
        seen = [
            bool(judge.observe(case_of(model), focus=focus).traces["eager"].operators)
            for focus in (None, *range(5))
        ]
        assert seen == want, model


@pytest.mark.parametrize("focus", [None, 0, 3])
def test_sums_without_an_order_are_known_on_every_draw(
    recipes: dict[str, Any], focus: int | None
) -> None:
    """Else later draws on several threads would compare bits that differ by chance."""
    for threads in (1, 2):
        case = case_of("chosen_experts", m=16, k=16, n=16, threads=threads)
        evidence = judge_of(recipes).observe(case, focus=focus)
        assert evidence.by_chance("output") == (threads == 2)


def test_an_aot_eager_graph_calls_sums_too(recipes: dict[str, Any]) -> None:
    case = case_of("mlp_swiglu", compile="aot_eager")
    judge = judge_of(recipes, "eager", "aot_eager")
    judged = judge.judge(case).verdicts
    assert any((v.rule, v.arm, v.status) == ("O25", "aot_eager", "ok") for v in judged)


@pytest.mark.parametrize("model", ["mlp_swiglu", "llama_block"])
def test_its_script_is_the_call_alone(
    recipes: dict[str, Any], tmp_path: Path, scripts: RunScript, model: str
) -> None:
    fault = "sum-drops-last-row"
    case, judge = case_of(model), judge_of(recipes)
    with builtin_faults()[fault].plant():
        (cause,) = judge.judge(case).causes
        script = write_short_script(of_operator(call_of(judge, case, cause)[0], cause, "cpu"))
    assert not needs_of(case, cause) and needs_of(case, replace(cause, at=At()))
    (path := tmp_path / "repro.py").write_text(script)
    assert "narrowfuzz" not in script and len(script.splitlines()) <= 60
    assert scripts(path, plant=("", fault)).shown
    clean = scripts(path)
    assert clean.code == 0 and "the result of sum at [0" in clean.output


def test_a_script_lays_its_tensors_out_as_they_were() -> None:
    import torch

    x = torch.arange(12.0).reshape(3, 4)
    for strides in ((4, 1), (1, 3), (0, 1), (8, 2)):
        again = laid(x[:1].expand(3, 4) if strides[0] == 0 else x, strides)
        assert again.stride() == strides
        assert np.array_equal(again, x[:1].expand(3, 4) if strides[0] == 0 else x)


def negated(call: OperatorCall) -> dict[str, Expected]:
    """What ``-x`` is, to the bit."""
    exact = -call.tensors["input"].astype(np.float64)
    nowhere = np.zeros(exact.shape, dtype=bool)
    return {"output": Expected(exact, np.zeros(exact.shape), exact, exact, nowhere)}


NEGATION = Operator(
    name="negation",
    words="negations",
    kernels=("aten::neg",),
    read=lambda named, result: Read({"input": named["self"]}, {"output": result}, {}),
    expected=negated,
    expression="-input",
    title=lambda call: "a negation",
)
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x):
        return -self.up(x)


def build():
    return Model(), torch.ones(3, 8)
"""


def test_one_record_is_all_that_an_operator_takes(
    recipes: dict[str, Any], tmp_path: Path, scripts: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen in a model of a user's, judged, named and shown by a script."""
    monkeypatch.setitem(BY_NAME, NEGATION.name, NEGATION)
    monkeypatch.setitem(BY_KERNEL, "aten::neg", NEGATION)
    (tmp_path / "mine.py").write_text(MODEL)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    spec = fixed(Spec(recipe="torch.fp32", model=model.name, dtype="fp32"), recipes["torch.fp32"])
    case, judge = Case(spec=spec, data=DataSpec()), judge_of(recipes)
    clean = judge.judge(case)
    assert not clean.causes
    assert ("negation", "ok") in {(v.role, v.status) for v in clean.verdicts if v.rule == "O25"}
    (call, *_) = (c for c in judge.observe(case).traces["eager"].operators if c.operator != "sum")
    wrong = replace(call, outputs={"output": -call.outputs["output"]})
    (verdict,) = judge_call("eager", wrong)
    assert verdict.sentence().startswith("model: a negation is wrong at [0, 0]: expected ")
    (path := tmp_path / "repro.py").write_text(
        write_short_script(of_operator(call, verdict, "cpu"))
    )
    assert scripts(path).code == 0  # torch's own is right


#: What the ledger says of the layer norms of this torch.
NARROW = Ledger([entry for entry in load_entries() if entry.id == "layer-norm-narrow-sums"])


@pytest.mark.parametrize(
    ("fault", "script_says"),
    [
        ("layer-norm-gradient-drops-rows", "grad_weight of layer_norm_backward at ["),
        ("layer-norm-counts-padding", "output of layer_norm at ["),
    ],
)
def test_one_of_several_results_has_a_script(
    recipes: dict[str, Any], tmp_path: Path, scripts: RunScript, fault: str, script_says: str
) -> None:
    case = case_of("layernorm_linear", m=37, k=48)
    judge = Judge(recipes, NARROW, arms=frozenset({"eager"}))
    assert not judge.judge(case).causes
    with builtin_faults()[fault].plant():
        cause, *others = judge.judge(case).causes
        script = write_short_script(of_operator(call_of(judge, case, cause)[0], cause, "cpu"))
    assert (cause.rule, cause.at.layer) == ("O25", "norm")
    assert {other.rule for other in others} <= {"O25"}
    assert parse(str(cause.at)) == cause.at and cause.at.result in str(cause.at)
    (path := tmp_path / "repro.py").write_text(script)
    assert scripts(path, plant=("", fault)).shown
    clean = scripts(path)
    assert clean.code == 0 and script_says in clean.output


def test_what_is_known_of_a_layer_norm_explains_its_parameters_gradients_alone(
    recipes: dict[str, Any],
) -> None:
    case = case_of("layernorm_linear", "bf16", m=65, compile="aot_eager")
    judgement = Judge(recipes, NARROW, arms=frozenset({"eager", "aot_eager"})).judge(case)
    known = [v for v in judgement.verdicts if v.explained_by == "layer-norm-narrow-sums"]
    assert {v.at.result for v in known if v.rule == "O25"} == {"grad_weight", "grad_bias"}
    assert not judgement.causes
    of_norm = Verdict("O9", "aot_eager", "grad_parameter", "diverged", at=At(name="norm.bias.grad"))
    (root, *_) = known
    assert root_of(of_norm, [root], BY_RULE) == root
    for name in ("output", "proj.weight.grad", "grad_input"):
        other = replace(of_norm, at=At(name=name))
        assert root_of(other, [root], BY_RULE) is None, name


def test_what_is_documented_to_raise_must() -> None:
    spec = Spec(recipe="torch.fp32", model="sdpa_mask_and_causal", dtype="fp32")
    why = MODELS[spec.model].forbidden
    assert "attn_mask" in why and not MODELS["sdpa_padding"].forbidden
    case = Case(spec=spec, data=DataSpec())
    ran = Trace("eager")
    raised = Trace("eager", error=RunError("forward", "RuntimeError", "no", "f"))

    def verdict(trace: Trace) -> Verdict:
        (found,) = check_contract(Evidence(case, {"eager": trace}, forbidden=why))
        return found

    assert verdict(raised).status == "ok"
    assert verdict(ran).status == "diverged"
    assert verdict(ran).sentence().endswith(f"{why}; got a result")
