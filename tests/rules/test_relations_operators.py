"""R28: what other operands make of one operator's results, and where nothing is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.relations import of_attention, of_gradients
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.relations_operators import _followed, changed_by
from narrowfuzz.trace.verdict import Verdict
from samples import of_operators, recipes

RELATED = [name for name, model in MODELS.items() if model.relations and not model.forbidden]


def case_of(model: str, dtype: str = "fp32", m: int = 17, **data: Any) -> Case:
    spec = Spec(recipe=f"torch.{dtype}", model=model, dtype=dtype, m=m, k=32, n=24, heads=2)
    return Case(spec=fixed(spec, recipes()[spec.recipe]), data=DataSpec(seed=3, **data))


def stepped(model: str, dtype: str) -> Case:
    case = case_of(model, dtype)
    steps = 3 if "optimizer" in MODELS[model].fixed else 1
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, steps=steps))


def judged(case: Case) -> list[Verdict]:
    judge = Judge(recipes(), of_operators(), arms=frozenset({"eager"}))
    return list(judge.judge(case, [BY_NAME["R28"]]).verdicts)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", RELATED)
def test_they_hold_of_torchs_own_kernels(model: str, dtype: str) -> None:
    verdicts = judged(stepped(model, dtype))
    assert {v.status for v in verdicts} <= {"ok", "inconclusive"}, [v.sentence() for v in verdicts]
    # where all is ignored every gradient is zero, or NaN
    assert [v for v in verdicts if v.status == "ok"] or "ignored" in model


def test_what_a_mask_hides_may_not_show() -> None:
    """Far inside the bound of the same results in float64, which O25 holds them to."""
    case = case_of("sdpa_padding")
    with builtin_faults()["attention-padding-shows-through"].plant():
        judge = Judge(recipes(), of_operators(), arms=frozenset({"eager"}))
        (cause,) = judge.judge(case).causes
    assert (cause.rule, cause.role) == ("R28", "output")
    assert "output does not follow the negated keys that no query sees" in cause.sentence()


def test_hidden_rows_alone_change() -> None:
    (relation,) = [r for r in of_attention("padding") if r.operands == {"key": -1.0}]
    evidence: Any = Judge(recipes(), of_operators()).observe(case_of("sdpa_padding"))
    key, changed = evidence.tensors["key"], changed_by(relation, evidence)["key"]
    assert np.array_equal(changed[:18], key[:18])
    assert np.array_equal(changed[18:], -key[18:])


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (case_of("linear"), "nothing to compare"),
        (case_of("sdpa_causal", m=24), "nothing to change"),  # a query for each key
        (case_of("sdpa", grad_exponent=-30), "numbers at an end of their range"),
        (case_of("sdpa", values="outlier_rows"), "probabilities may be subnormal"),
        (case_of("sdpa", "fp16"), "numbers of fp16 may be subnormal on the way"),
        (case_of("sdpa_mask_and_causal"), "it must raise an error"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_where_nothing_is_said(case: Case, why: str) -> None:
    assert why in {v.why for v in judged(case) if v.status == "not_applicable"}


def test_a_relation_knows_whether_it_scales() -> None:
    negated, times_8 = of_gradients("weight")
    assert (negated.scales, times_8.scales) == (False, True)


@pytest.mark.parametrize("kernel", ["attention_cudnn_backward", "attention_flash_backward"])
def test_of_cudnn_a_nan_may_be_an_infinity(kernel: str) -> None:
    """Its attention answers an infinite gradient with either, by its sign; a number it may not
    answer with."""
    case = case_of("sdpa", m=2)
    judge = Judge(recipes(), of_operators(), arms=frozenset({"eager"}))
    evidence: Any = judge.observe(case)
    base = evidence.traces[evidence.base]
    outputs = {**base.outputs, "key.grad": base.outputs["key.grad"].copy()}
    outputs["key.grad"][0, 0], outputs["key.grad"][0, 1] = np.nan, np.inf
    calls = tuple(replace(call, operator=kernel) for call in base.operators)
    answered = replace(base, outputs=outputs, operators=calls)
    other = {**outputs, "key.grad": -outputs["key.grad"]}
    other["key.grad"][0, 0] = -np.inf

    def rerun(tensors: Any, spec: Spec, arm: str) -> Any:
        return replace(answered, outputs=other)

    (relation,) = [r for r in of_gradients("key") if r.operands["grad_output"] == -1.0]
    changed = replace(evidence, traces={evidence.base: answered}, rerun=rerun)
    found = {
        v.role: v.status
        for v in _followed(changed, relation, answered, changed_by(relation, changed))
    }
    assert found["grad_parameter"] == ("ok" if "cudnn" in kernel else "diverged")
    other["key.grad"][0, 0] = 1.0
    found = {
        v.role: v.status
        for v in _followed(changed, relation, answered, changed_by(relation, changed))
    }
    assert found["grad_parameter"] == "diverged"
