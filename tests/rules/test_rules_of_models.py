"""The rules of models on traces made by hand: layers, products, and copies of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import F32, FORMATS, round_to
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.kernels import CALLS, check_kernels, check_weight_copies
from narrowfuzz.rules.layers import layer_evidences, layer_spec, layer_tensors
from narrowfuzz.trace.trace import LayerCall, Multiplied, Seen, SiteTrace, Trace
from narrowfuzz.trace.verdict import Verdict
from samples import recipes

RECIPES = recipes()
ROWWISE = "torchao.float8.rowwise"
ARM = "aot_eager"


def numbers(*shape: int, seed: int = 0) -> F32:
    """bf16 values around 1."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return round_to(x, FORMATS["bf16"], overflow="ieee").astype(np.float32)


def evidence_of(
    traces: dict[str, Trace], *, recipe: str = "torch.bf16", seed: int = 0, exact: Any = None,
    focus: int | None = None, tensors: dict[str, F32] | None = None, **changes: Any,
) -> Evidence:  # fmt: skip
    spec = Spec(recipe=recipe, **{"model": "mlp_gelu", "k": 4, "n": 6, "m": 3, **changes})
    return Evidence(
        case=Case(spec=spec, data=DataSpec(seed=seed)), plan=RECIPES[recipe].plan(spec),
        tensors=tensors or {}, traces={n: replace(t, arm=n) for n, t in traces.items()}, repeats={},
        elides=frozenset(), deviations={}, refusal="", twin=(lambda: exact) if exact else None,
        converted_plan_of=RECIPES[recipe].plan, pointwise=False, focus=focus,
    )  # fmt: skip


def found(check: Callable[[Evidence], Any], evidence: Evidence) -> list[Verdict]:
    return list(check(evidence))


def statuses(check: Callable[[Evidence], Any], evidence: Evidence) -> list[str]:
    return [v.status for v in check(evidence)]


def call(module: str = "up", index: int = 0, phase: Any = "forward", seed: int = 0,
         sites: tuple[SiteTrace, ...] = (), **more: F32) -> LayerCall:  # fmt: skip
    x, w = numbers(3, 4, seed=seed), numbers(6, 4, seed=9)
    return LayerCall(module, index, phase, "bf16", {"input": x, "weight": w, **more},
                     {"output": (x @ w.T).astype(np.float32)}, sites)  # fmt: skip


class TestLayerEvidence:
    def test_some_calls_of_each_layer_are_cases_of_their_own(self) -> None:
        calls = (call(), call("down"), *(call(index=i, seed=i) for i in range(1, 10)))
        evidence = evidence_of({"eager": Trace("eager", calls=calls)}, steps=5, microbatches=2)
        seen = list(layer_evidences(evidence))
        assert [(at.layer, at.call) for at, _ in seen] == [
            ("up", 0), ("down", 0), ("up", 3), ("up", 6), ("up", 9),
        ]  # fmt: skip
        assert np.array_equal(seen[2][1].tensors["input"], calls[4].tensors["input"])
        for _, layer in seen:
            assert layer.spec.direct and set(layer.traces) == {"eager"}
            assert layer.rerun is None and layer.twin is None and not layer.repeats

    def test_recomputed_calls_and_other_arms_are_not_judged_here(self) -> None:
        again = Trace("eager+checkpoint", calls=(call(),))
        evidence = evidence_of({"eager": Trace("eager", calls=(call(phase="recompute"),)),
                                "eager+checkpoint": again})  # fmt: skip
        assert not list(layer_evidences(evidence))
        assert not list(layer_evidences(evidence_of({})))

    @pytest.mark.parametrize("trained", [False, True])
    def test_its_spec_is_what_the_call_was(self, trained: bool) -> None:
        more = {"bias": numbers(6)} | ({"grad_output": numbers(3, 6)} if trained else {})
        of_model = Spec(recipe=ROWWISE, backend="emulated", model="two_blocks", steps=3, k=64)
        spec = layer_spec(of_model, call(**more))
        assert spec == Spec(recipe=ROWWISE, backend="emulated", m=3, k=4, n=6, bias=True,
                            grad_mode="train" if trained else "no_grad")  # fmt: skip

    def test_under_autocast_parameters_are_those_it_computed_with(self) -> None:
        wide = np.full((6, 4), 1.0 + 2.0**-12, dtype=np.float32)
        tensors = layer_tensors(call(weight=wide))
        assert (tensors["weight"] == 1.0).all() and tensors["weight"].dtype == np.float32
        full = replace(call(weight=wide), dtype="fp32")
        assert np.array_equal(layer_tensors(full)["weight"], wide)


def multiplied(seed: int = 0, phase: Any = "forward", bias: F32 | None = None) -> Multiplied:
    a, b = numbers(5, 8, seed=seed), numbers(7, 8, seed=seed + 50)
    exact = a.astype(np.float64) @ b.T.astype(np.float64) + (0.0 if bias is None else bias)
    result = round_to(exact, FORMATS["bf16"], overflow="ieee").astype(np.float32)
    return Multiplied(phase, Seen(values=a), Seen(values=b), result, "bf16", bias)


def off_by(one: Multiplied, far: float) -> Multiplied:
    result = one.result.copy()
    result[2, 3] += far
    return replace(one, result=result)


class TestKernels:
    def judge(self, *seen: Multiplied, focus: int | None = None) -> list[Verdict]:
        return found(check_kernels, evidence_of({ARM: Trace(ARM, multiplied=seen)}, focus=focus))

    @pytest.mark.parametrize("bias", [None, numbers(7, seed=3)])
    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_a_right_multiply_is_left_alone_and_a_wrong_one_found(
        self, phase: Any, bias: F32 | None
    ) -> None:
        right = multiplied(phase=phase, bias=bias)
        (verdict,) = self.judge(right)
        rule = "O5" if phase == "forward" else "O15"
        assert (verdict.rule, verdict.status, verdict.arm) == (rule, "ok", ARM)
        (verdict,) = self.judge(off_by(right, 0.25))
        assert (verdict.rule, verdict.status) == (rule, "diverged")
        assert verdict.at.index == (2, 3) and verdict.factor > 1

    def test_codes_count_with_their_inverse_scales(self) -> None:
        weight, x = numbers(7, 8, seed=1), numbers(5, 8, seed=2)
        a, b = (as_seen(quantised(t)) for t in (x, weight))
        exact = dequantised(x) @ dequantised(weight).T
        result = round_to(exact, FORMATS["bf16"], overflow="ieee").astype(np.float32)
        right = Multiplied("forward", a, b, result, "bf16")
        assert [v.status for v in self.judge(right)] == ["ok"]
        wrong = replace(right, b=replace(b, scale=b.scale * 2))
        assert [v.status for v in self.judge(wrong)] == ["diverged"]

    def test_what_may_overflow_says_nothing(self) -> None:
        big = Seen(values=np.full((5, 8), 1e38, dtype=np.float32))
        one = replace(multiplied(), a=big, b=replace(big, values=big.values[:4]),
                      result=np.zeros((5, 4), np.float32))  # fmt: skip
        assert [v.status for v in self.judge(one)] == ["inconclusive"]

    def test_nothing_seen_is_not_a_pass(self) -> None:
        assert [v.status for v in self.judge()] == ["inconclusive"]

    def test_eager_arms_have_their_own_rules(self) -> None:
        trace = Trace("eager", multiplied=(off_by(multiplied(), 1.0),))
        assert not found(check_kernels, evidence_of({"eager": trace, "eager+checkpoint": trace}))

    def test_with_a_focus_some_of_many_are_judged_without_one_all(self) -> None:
        many = [multiplied(seed=i) for i in range(2 * CALLS)]
        many[-1] = off_by(many[-1], 1.0)
        bad = [any(v.status == "diverged" for v in self.judge(*many, focus=f)) for f in range(12)]
        assert sum(bad) == CALLS
        assert len(self.judge(*many)) == len(many)


def quantised(t: F32) -> reference.Quantised:
    plan = RECIPES[ROWWISE].plan(Spec(recipe=ROWWISE)).gemms["output"].b
    made = reference.quantise(t, plan)
    assert made is not None
    return made


def dequantised(t: F32) -> Any:
    return quantised(t).values


def as_seen(q: reference.Quantised) -> Seen:
    """As a kernel takes it."""
    inverse = (np.float32(1.0) / q.scale).astype(np.float32)
    return Seen(q.codes, inverse, scale_is_inverse=True, format="e4m3fn")


WEIGHTS = {
    "up.weight": numbers(6, 4, seed=1),
    "gate.weight": numbers(6, 4, seed=2),
    "down.weight": numbers(4, 6, seed=3),
}


class TestWeightCopies:
    def judge(self, *copies: Seen, **changes: Any) -> list[Verdict]:
        trace = Trace(ARM, multiplied=tuple(map(self.multiplied, copies)))
        evidence = evidence_of({ARM: trace}, recipe=ROWWISE, tensors=WEIGHTS, **changes)
        return found(check_weight_copies, evidence)

    def multiplied(self, copy: Seen) -> Multiplied:
        x = as_seen(quantised(numbers(3, copy.codes.shape[1])))  # type: ignore[union-attr]
        return Multiplied("forward", x, copy, np.zeros((3, 6), np.float32), "bf16")

    def test_every_copy_is_judged_unless_the_case_has_a_focus(self) -> None:
        copies = [as_seen(quantised(weight)) for weight in WEIGHTS.values()]
        for focus, layers in ((None, {"up", "gate", "down"}), (1, {"gate", "down"})):
            assert {v.at.layer for v in self.judge(*copies, focus=focus)} == layers

    @pytest.mark.parametrize("name", ["up", "gate", "down"])
    def test_the_plans_copy_of_any_weight_is_right(self, name: str) -> None:
        verdicts = self.judge(as_seen(quantised(WEIGHTS[f"{name}.weight"])))
        assert {(v.rule, v.status, v.at.layer) for v in verdicts} == {
            ("O3", "ok", name), ("O2", "ok", name)
        }  # fmt: skip

    def test_a_wrong_code_is_found_at_its_layer(self) -> None:
        right = as_seen(quantised(WEIGHTS["gate.weight"]))
        codes = right.codes.copy()  # type: ignore[union-attr]
        codes[2, 1] ^= 1
        bad = [v for v in self.judge(replace(right, codes=codes)) if v.status == "diverged"]
        assert [(v.rule, v.at.layer, v.at.side, v.at.index) for v in bad] == [
            ("O2", "gate", "b", (2, 1))
        ]

    def test_a_wrong_scale_is_found_at_its_layer(self) -> None:
        right = as_seen(quantised(WEIGHTS["gate.weight"]))
        bad = [v for v in self.judge(replace(right, scale=right.scale * 2))
               if v.status == "diverged"]  # fmt: skip
        assert {v.at.layer for v in bad} == {"gate"} and bad[0].rule == "O3"

    def test_an_operand_that_is_no_weight_is_not_judged_as_one(self) -> None:
        verdicts = self.judge(as_seen(quantised(numbers(5, 4))))
        assert [(v.status, v.why) for v in verdicts] == [
            ("inconclusive", "no weight of that shape")
        ]

    def test_after_an_optimizer_step_the_weights_are_unknown(self) -> None:
        assert not self.judge(as_seen(quantised(WEIGHTS["up.weight"])), steps=2)


def outputs(**changes: F32) -> dict[str, F32]:
    return {"output": numbers(3, 4), "grad_input": numbers(3, 4, seed=1),
            "up.weight.grad": numbers(6, 4, seed=2), **changes}  # fmt: skip
