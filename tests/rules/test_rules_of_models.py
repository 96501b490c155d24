"""The rules of models on traces made by hand: what they find, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.case.spec import OPTIMIZERS, Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import F32, FORMATS, round_to
from narrowfuzz.operators.attention_statistics import OFF_BESIDE_A_MASK
from narrowfuzz.play.attention_scores import scores
from narrowfuzz.play.check import statistics
from narrowfuzz.play.watches import Attended
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.kernels import CALLS, check_kernels, check_weight_copies
from narrowfuzz.rules.layers import layer_evidences, layer_spec, layer_tensors
from narrowfuzz.rules.recompute import (
    check_checkpoint,
    check_recompute,
    check_statistics,
    softmax_excess,
)
from narrowfuzz.rules.whole import check_ratio, check_strict
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import read
from narrowfuzz.trace.trace import (
    AttentionCall,
    LayerCall,
    Multiplied,
    Seen,
    Site,
    SiteTrace,
    Trace,
)
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
    def judge(self, copy: Seen, **changes: Any) -> list[Verdict]:
        x = as_seen(quantised(numbers(3, copy.codes.shape[1])))  # type: ignore[union-attr]
        one = Multiplied("forward", x, copy, np.zeros((3, 6), np.float32), "bf16")
        trace = Trace(ARM, multiplied=(one,))
        evidence = evidence_of({ARM: trace}, recipe=ROWWISE, tensors=WEIGHTS, **changes)
        return found(check_weight_copies, evidence)

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


class TestCheckpointEqual:
    def judge(self, after: dict[str, F32], arm: str = "eager+checkpoint") -> list[Verdict]:
        traces = {"eager": Trace("eager", outputs()), arm: Trace(arm, after)}
        return found(check_checkpoint, evidence_of(traces, checkpoint="full"))

    def test_equal_bits_pass_nan_and_signed_zero_included(self) -> None:
        special = np.array([[np.nan, 0.0, np.inf, 1.0]], np.float32)
        traces = {"eager": Trace("eager", {"output": special}),
                  "eager+checkpoint": Trace("", {"output": special * np.float32(1.0)})}  # fmt: skip
        assert statuses(check_checkpoint, evidence_of(traces)) == ["ok"]
        assert [v.status for v in self.judge(outputs())] == ["ok"]

    def test_one_bit_is_found_and_the_earliest_result_named(self) -> None:
        later, sooner = numbers(6, 4, seed=2), numbers(3, 4, seed=1)
        later[0, 0] += 2.0**-7
        sooner[2, 3] += 2.0**-7
        (verdict,) = self.judge(outputs(**{"up.weight.grad": later}))
        assert (verdict.status, verdict.role) == ("diverged", "grad_parameter")
        assert str(verdict.at) == "result up.weight.grad[0, 0]"
        (verdict,) = self.judge(outputs(**{"up.weight.grad": later, "grad_input": sooner}))
        assert (verdict.role, verdict.at.index) == ("grad_input", (2, 3))

    def test_a_gradient_that_one_run_lacks_is_a_difference(self) -> None:
        after = outputs()
        del after["up.weight.grad"]
        (verdict,) = self.judge(after)
        assert (verdict.status, verdict.at.name) == ("diverged", "up.weight.grad")

    def test_compiled_arms_are_for_another_rule(self) -> None:
        assert not self.judge(outputs(output=numbers(3, 4) + 1), arm="aot_eager+checkpoint")


class TestStrictCompile:
    def judge(self, arm: str, *, pointwise: bool, bias: bool = False) -> str:
        wrong = outputs(output=numbers(3, 4) + 1)
        evidence = evidence_of({"eager": Trace("", outputs()), arm: Trace("", wrong)}, bias=bias)
        evidence = replace(evidence, pointwise=pointwise, twin=dict)
        (status,) = statuses(check_strict, evidence)
        return status

    @pytest.mark.parametrize(
        ("arm", "pointwise", "bias", "status"),
        [
            ("aot_eager", False, True, "diverged"),
            ("aot_eager+checkpoint", False, True, "diverged"),
            ("aot_eager_decomp_partition", False, False, "not_applicable"),
            ("aot_eager_decomp_partition", True, True, "diverged"),
            ("inductor_strict", True, False, "diverged"),
            ("inductor_strict", True, True, "not_applicable"),
            ("inductor", True, False, "not_applicable"),
        ],
    )
    def test_where_bits_are_promised(
        self, arm: str, pointwise: bool, bias: bool, status: str
    ) -> None:
        assert self.judge(arm, pointwise=pointwise, bias=bias) == status


class TestRecompute:
    arm = "eager+checkpoint"

    def judge(self, *calls: LayerCall, recipe: str = ROWWISE) -> list[Verdict]:
        trace = Trace(self.arm, outputs(), calls=calls)
        evidence = evidence_of({self.arm: trace}, recipe=recipe, checkpoint="full")
        return found(check_recompute, evidence)

    def site(self, values: F32, phase: Any) -> tuple[SiteTrace, ...]:
        seen = as_seen(quantised(values))
        return (SiteTrace(Site("up", "output", phase), seen, seen),)

    def test_a_call_that_repeats_its_forward_is_left_alone(self) -> None:
        x = numbers(3, 4)
        verdicts = self.judge(call(sites=self.site(x, "forward")),
                              call(phase="recompute", sites=self.site(x, "recompute")))  # fmt: skip
        assert [v.status for v in verdicts] == ["ok"] * 4  # input, weight, both operands

    def test_another_input_is_found_at_its_layer(self) -> None:
        moved = call("down", phase="recompute", seed=4)
        bad = [v for v in self.judge(call("down"), moved) if v.status == "diverged"]
        assert [(v.at.layer, v.symptom) for v in bad] == [("down", "operands differ in recompute")]

    def test_another_code_is_found_though_the_input_is_the_same(self) -> None:
        bad = [v for v in self.judge(call(sites=self.site(numbers(3, 4), "forward")),
                                     call(phase="recompute",
                                          sites=self.site(-numbers(3, 4), "recompute")))
               if v.status == "diverged"]  # fmt: skip
        assert {v.symptom for v in bad} == {"codes differ in recompute"}
        assert {v.at.side for v in bad} == {"a", "b"}

    def test_each_call_is_held_to_its_own_forward(self) -> None:
        """The second call of a layer used twice is not the first one's recompute."""
        forward = [replace(call(index=i, seed=i), segment=1) for i in (0, 1)]
        again = [replace(one, phase="recompute") for one in reversed(forward)]
        assert {v.status for v in self.judge(*forward, *again)} == {"ok"}
        swapped = [replace(one, index=1 - one.index) for one in again]
        bad = [v for v in self.judge(*forward, *swapped) if v.status == "diverged"]
        assert len(bad) == 2

    def test_a_models_own_checkpoints_are_recomputed_in_any_order(self) -> None:
        """But each recompute must be that of a call."""
        forward = [call(index=i, seed=i) for i in (0, 1)]
        swapped = [call(index=i, seed=1 - i, phase="recompute") for i in (0, 1)]
        assert {v.status for v in self.judge(*forward, *swapped)} == {"ok"}
        # of two forwards on the same input the weight has changed in between
        later = [replace(call(index=2, weight=numbers(6, 4, seed=3)), forward=1)]
        later += [replace(one, index=2, phase="recompute") for one in later]
        retained = [replace(one, index=one.index + 2) for one in swapped]
        every = (*forward, *swapped, *retained, *later)
        assert {v.status for v in self.judge(*every)} == {"ok"}
        other = call(index=2, seed=7, phase="recompute")
        assert "diverged" in {v.status for v in self.judge(*forward, *swapped, other)}

    def test_without_a_recompute_nothing_is_known(self) -> None:
        assert [v.status for v in self.judge(call())] == ["inconclusive"]


class TestRecomputeCompiled:
    """A backward GEMM with a forward's weight is that forward's, once more."""

    def judge(self, *seen: Multiplied) -> Verdict:
        arm = "aot_eager+checkpoint"
        (verdict,) = found(check_recompute, evidence_of({arm: Trace(arm, multiplied=seen)}))
        return verdict

    def test_the_same_operands_pass_and_others_do_not(self) -> None:
        forward = multiplied()
        assert self.judge(forward, replace(forward, phase="backward")).status == "ok"
        moved = replace(forward, phase="backward", a=Seen(values=numbers(5, 8, seed=77)))
        assert self.judge(forward, moved).symptom == "operands differ in recompute"

    def test_gradients_are_no_recompute(self) -> None:
        verdict = self.judge(multiplied(), multiplied(seed=5, phase="backward"))
        assert verdict.status == "not_applicable"

    def test_one_weight_used_twice_may_be_recomputed_either_way(self) -> None:
        first = multiplied()
        second = replace(multiplied(seed=1), b=first.b)
        again = replace(second, phase="backward")
        assert self.judge(first, second, again).status == "ok"

    def test_a_symmetric_weight_says_nothing(self) -> None:
        """W^T of the input gradient is then W of the recompute."""
        square = Seen(values=np.eye(8, dtype=np.float32))
        forward = replace(multiplied(), b=square)
        backward = replace(forward, phase="backward", a=Seen(values=numbers(5, 8, seed=7)))
        assert self.judge(forward, backward).status == "not_applicable"


CAUSAL = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
#: What masks add to the scores of 6 rows.
MASKS = {
    "none": None,
    "causal": CAUSAL,
    "two documents": np.where(np.arange(6)[:, None] // 3 == np.arange(6) // 3, CAUSAL, -np.inf),
    "padding": np.where(np.arange(6) < 4, 0.0, -np.inf)[None, None, None],
    "ALiBi": CAUSAL - 0.5 * np.abs(np.arange(6)[:, None] - np.arange(6)),
    "least number": np.where(CAUSAL == 0, 0.0, -3.4e38),
    "a row that sees nothing": np.where(np.arange(6)[:, None] == 2, -np.inf, CAUSAL),
    "a row of least numbers": np.where(np.arange(6)[:, None] == 2, -3.4e38, CAUSAL),
}


def attention(phase: Any, seed: int = 0, *, mask: str = "causal") -> AttentionCall:
    """Two heads of 6 rows, with the log-sum-exp and the output that belong to them."""
    q, k, v = (numbers(1, 2, 6, 4, seed=seed + i) for i in range(3))
    added = None if MASKS[mask] is None else MASKS[mask].astype(np.float32)  # type: ignore[union-attr]
    scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) * 0.5
    scores = scores if added is None else scores + added
    with np.errstate(divide="ignore", invalid="ignore"):
        highest = scores.max(-1, keepdims=True)
        sums = np.exp(scores - highest).sum(-1)
        # of a row that sees nothing torch's kernels on a CPU give 0
        lse = np.where(np.isfinite(highest[..., 0]), highest[..., 0] + np.log(sums), 0.0)
        out = np.exp(scores - lse[..., None]) @ v
    return AttentionCall(phase, q, k, v, out.astype(np.float32), lse.astype(np.float32), added, 0.5)


def attended(call: AttentionCall) -> Attended:
    """The same call as a script sees it."""
    tensors = (torch.from_numpy(getattr(call, name)) for name in ("q", "k", "v", "out", "lse"))
    added = None if call.added is None else torch.from_numpy(call.added)
    return Attended(call.phase, *tensors, added, call.scale, call.module, call.unknown)


class TestStatistics:
    def judge(self, *calls: AttentionCall) -> list[Verdict]:
        return found(check_statistics, evidence_of({"inductor": Trace("", attention=calls)}))

    @pytest.mark.parametrize("mask", MASKS)
    def test_a_backward_that_got_its_forwards_tensors_passes(self, mask: str) -> None:
        pair = (attention(phase, mask=mask) for phase in ("forward", "backward"))
        other = attention("forward", seed=20, mask=mask)
        assert [v.status for v in self.judge(other, *pair)] == ["ok"]

    @pytest.mark.parametrize("mask", MASKS)
    def test_a_backward_that_got_another_mask_is_found(self, mask: str) -> None:
        forward, backward = (attention(phase, mask=mask) for phase in ("forward", "backward"))
        seen = np.zeros((6, 6), np.float32) if backward.added is None else backward.added
        another = replace(backward, added=seen - np.float32(0.5) * np.eye(6, dtype=np.float32))
        (verdict,) = self.judge(forward, another)
        assert (verdict.status, verdict.symptom) == ("diverged", "probabilities do not sum to 1")

    @pytest.mark.parametrize("mask", MASKS)
    def test_the_script_asks_the_same(self, mask: str) -> None:
        """What a finding's script says of the same calls, sound and with another log-sum-exp."""
        for far in (0.0, 2.0**-6):
            calls = [attention(phase, mask=mask) for phase in ("forward", "backward")]
            calls = [replace(call, lse=call.lse + np.float32(far)) for call in calls]
            adds = evidence_of({}).accumulators["attention fp32"]
            excess, allowed, _ = softmax_excess(calls[1], adds)
            assert (excess > 1.0) is (far > 0) and allowed > 0
            assert statistics([attended(call) for call in calls], allowed)[1] is (far > 0)

    @pytest.mark.parametrize(
        ("moved", "keys", "status"),
        [(-1e9, 6, "diverged"), (-1e8, 6, "diverged"), (-1e9, 5, "ok"), (-1e9, 1, "ok")],
    )
    def test_a_row_behind_a_large_mask_is_known_by_it(
        self, monkeypatch: pytest.MonkeyPatch, moved: float, keys: int, status: str
    ) -> None:
        """Beside -1e9 fp32 keeps no score and no logarithm: with one log-sum-exp, each of six keys
        has the probability 1. Where one key is not behind it, nothing is lost."""
        added = np.zeros((6, 6), np.float32)
        added[2, :keys] = moved
        monkeypatch.setitem(MASKS, "large", added)
        calls = [attention(phase, mask="large") for phase in ("forward", "backward")]
        (verdict,) = self.judge(*calls)
        assert verdict.status == status
        if status == "diverged":
            assert verdict.symptom == "probabilities do not sum to 1 beside a large mask"
        shown = statistics([attended(one) for one in calls], OFF_BESIDE_A_MASK)[1]
        assert shown is (status == "diverged")

    def test_scores_that_fp32_does_not_hold_say_nothing(self) -> None:
        """A kernel sees a row of -inf there, as if all its keys were masked."""
        call = attention("backward")
        huge = np.float32(1e30)
        far = replace(call, q=np.abs(call.q) * huge, k=-np.abs(call.k) * huge,
                      lse=np.zeros_like(call.lse))  # fmt: skip
        adds = evidence_of({}).accumulators["attention fp32"]
        assert softmax_excess(far, adds) == (0.0, 0.0, False)
        calls = [attended(far), attended(replace(far, phase="forward"))]
        assert not statistics(calls, 2.0**-10)[1]

    def test_what_is_not_known_of_the_scores_is_inconclusive(self) -> None:
        calls = [replace(attention(phase), unknown="alibi_slopes", lse=attention(phase).lse + 1)
                 for phase in ("forward", "backward")]  # fmt: skip
        (verdict,) = self.judge(*calls)
        assert verdict.status == "inconclusive" and "alibi_slopes" in verdict.why
        assert not statistics([attended(call) for call in calls], 2.0**-10)[1]

    def test_the_module_that_called_attention_is_named(self) -> None:
        one, two = (replace(attention("forward", seed=s), module=f"layers.{s}") for s in (0, 30))
        (verdict,) = self.judge(one, two, replace(attention("backward", 30), lse=two.lse + 1))
        assert verdict.symptom == "log-sum-exp of no forward" and verdict.at.layer == "layers.30"

    def test_heads_of_queries_may_share_keys_and_values(self) -> None:
        def grouped(phase: Any) -> AttentionCall:
            call = attention(phase)
            one = replace(call, k=call.k[:, :1].copy(), v=call.v[:, :1].copy())
            both = replace(call, k=np.repeat(one.k, 2, 1), v=np.repeat(one.v, 2, 1))
            scores = both.q.astype(np.float64) @ np.swapaxes(both.k, -1, -2) * both.scale
            scores = np.where(np.triu(np.ones((6, 6), bool), 1), -np.inf, scores)
            lse = np.log(np.exp(scores).sum(-1))
            out = np.exp(scores - lse[..., None]) @ both.v
            return replace(one, out=out.astype(np.float32), lse=lse.astype(np.float32))

        assert [v.status for v in self.judge(grouped("forward"), grouped("backward"))] == ["ok"]

    @pytest.mark.parametrize(
        ("change", "symptom"),
        [
            ({"lse": 1.0}, "log-sum-exp of no forward"),
            ({"out": 1.0}, "output of another forward"),
            ({"q": 0.5}, "attention's inputs moved after forward"),
            ({"k": 0.5}, "attention's inputs moved after forward"),
            ({"v": 0.5}, "attention's inputs moved after forward"),
        ],
    )
    def test_what_does_not_belong_to_the_forward_is_found(
        self, change: dict[str, float], symptom: str
    ) -> None:
        backward = attention("backward")
        for name, far in change.items():
            backward = replace(backward, **{name: getattr(backward, name) + np.float32(far)})
        (verdict,) = self.judge(attention("forward"), backward)
        assert (verdict.status, verdict.symptom) == ("diverged", symptom)

    def test_another_forwards_statistics_are_found(self) -> None:
        one, two = attention("forward"), attention("forward", seed=30)
        mixed = replace(attention("backward"), lse=two.lse, out=two.out)
        (verdict,) = self.judge(one, two, mixed)
        assert verdict.symptom == "attention's inputs moved after forward" and verdict.factor > 1

    def test_a_forward_that_is_wrong_by_itself_is_found_by_its_sums(self) -> None:
        wrong = [replace(attention(p), lse=attention(p).lse + np.float32(2.0**-6))
                 for p in ("forward", "backward")]  # fmt: skip
        (verdict,) = self.judge(*wrong)
        assert verdict.symptom == "probabilities do not sum to 1"
        assert verdict.factor > 1 and 0 < read(verdict.expect.limit) < 2.0**-6

    @pytest.mark.parametrize(("query", "status"), [(2.0**-128, "ok"), (2.0**-124, "diverged")])
    def test_subnormals_may_be_taken_for_zero_and_nothing_else(
        self, query: float, status: str
    ) -> None:
        """The statistics are those of scores that are all zero."""
        rows, k = np.arange(1.0, 7.0, dtype=np.float32), np.full((1, 2, 6, 4), 2.0**122)
        call = attention("forward")
        pair = [
            replace(call, phase=phase, q=np.full_like(call.q, query), k=k.astype(np.float32),
                    lse=np.broadcast_to(np.log(rows), call.lse.shape).astype(np.float32))
            for phase in ("forward", "backward")
        ]  # fmt: skip
        assert [v.status for v in self.judge(*pair)] == [status]

    def test_scores_too_large_to_sum_are_inconclusive(self) -> None:
        huge = [replace(attention(p), q=attention(p).q * np.float32(2.0**24))
                for p in ("forward", "backward")]  # fmt: skip
        summed = scores(huge[0].q.astype(np.float64), huge[0].k, huge[0].scale, huge[0].added)
        theirs = [replace(call, lse=summed.max(-1).astype(np.float32)) for call in huge]
        assert [v.status for v in self.judge(*theirs)] == ["inconclusive"]
        # that all probabilities are 0 is sure even so
        assert [v.status for v in self.judge(*huge)] == ["diverged"]

    def test_zeros_are_inconclusive_unless_something_is_in_their_place(self) -> None:
        none = np.zeros((1, 2, 6, 4), np.float32)
        rows = np.log(np.arange(1.0, 7.0)).astype(np.float32)
        empty = {"q": none, "k": none, "v": none, "out": none, "lse": np.tile(rows, (1, 2, 1))}
        one, two = (replace(attention(p), **empty) for p in ("forward", "backward"))
        assert [v.status for v in self.judge(one, two)] == ["inconclusive"]
        moved = replace(two, v=none + np.float32(1.0))
        assert [v.status for v in self.judge(one, moved)] == ["diverged"]

    def test_without_an_attention_kernel_there_is_nothing_to_judge(self) -> None:
        assert [v.status for v in self.judge()] == ["not_applicable"]
        assert [v.status for v in self.judge(attention("forward"))] == ["not_applicable"]


class TestRatio:
    """Eager is off by 2^-8 everywhere; what may the compiled arm be off by?"""

    exact = np.ones((40, 50))
    eager = np.full((40, 50), 1 + 2.0**-8, dtype=np.float32)

    def judge(self, got: F32, *, exact: Any = None, eager: Any = None, **changes: Any) -> Verdict:
        traces = {"eager": Trace("", {"output": self.eager if eager is None else eager}),
                  "inductor": Trace("", {"output": got})}  # fmt: skip
        exact = {"output": self.exact if exact is None else exact}
        (verdict,) = found(check_ratio, evidence_of(traces, exact=exact, **changes))
        return verdict

    @pytest.mark.parametrize(("times", "status"), [(2.5, "ok"), (6.0, "diverged")])
    def test_three_times_eagers_error_is_the_limit_of_a_large_bf16_result(
        self, times: float, status: str
    ) -> None:
        got = np.full((40, 50), 1 + times * 2.0**-8, dtype=np.float32)
        verdict = self.judge(got)
        assert verdict.status == status
        assert status == "ok" or (verdict.at == At(name="output") and verdict.factor > 1)

    def test_counts_of_a_choice_are_not_compared_but_other_buffers_are(self) -> None:
        """A score that is rounded otherwise sends a row to another expert."""
        name, counts = "counts.buffer", np.array([3.0, 5.0], np.float32)
        for off, status in ((0.0, "inconclusive"), (0.25, "diverged")):
            before, later = counts + np.float32(off), counts[::-1] + np.float32(off)
            traces = {"eager": Trace("", {name: before}), "inductor": Trace("", {name: later})}
            exact = {name: before.astype(np.float64)}
            (verdict,) = found(check_ratio, evidence_of(traces, exact=exact))
            assert verdict.status == status

    def test_few_elements_may_be_off_by_more(self) -> None:
        few = {"exact": self.exact[:3], "eager": self.eager[:3]}
        got = np.full((3, 50), 1 + 6 * 2.0**-8, dtype=np.float32)
        assert self.judge(got, **few).status == "ok"
        assert self.judge(got + np.float32(0.1), **few).status == "diverged"

    def test_one_bad_row_is_found_although_the_whole_is_fine(self) -> None:
        got = self.eager.copy()
        got[7] += np.float32(14 * 2.0**-8)
        verdict = self.judge(got)
        assert (verdict.status, verdict.at) == ("diverged", At(name="output", index=(7,)))

    def test_a_row_of_one_expert_is_found_in_a_stack_of_matrices(self) -> None:
        exact, eager = (x.reshape(4, 10, 50) for x in (self.exact, self.eager))
        got = eager.copy()
        got[2, 7] += np.float32(14 * 2.0**-8)
        verdict = self.judge(got, exact=exact, eager=eager)
        assert (verdict.status, verdict.at) == ("diverged", At(name="output", index=(2, 7)))

    def test_a_row_that_eager_has_right_by_luck_may_be_as_wrong_as_others(self) -> None:
        """The seventh has no error; ten times what the others have is too much there, too."""
        eager = self.eager.copy()
        eager[7] = 1.0
        for times, status in ((5, "ok"), (14, "diverged")):
            got = eager.copy()
            got[7] += np.float32(times * 2.0**-8)
            assert self.judge(got, eager=eager).status == status

    def test_a_small_result_that_eager_has_right_by_luck_may_err_as_its_kind_does(self) -> None:
        grads = {f"{name}.weight.grad": self.exact[:3] for name in "abc"}
        eager = dict.fromkeys(grads, self.eager[:3]) | {"a.weight.grad": self.exact[:3]}
        for times, status in ((5, "ok"), (14, "diverged")):
            got = eager | {"a.weight.grad": np.float32(1 + times * 2.0**-8) * self.eager[:3] ** 0}
            traces = {"eager": Trace("", eager), "inductor": Trace("", got)}
            (verdict,) = found(check_ratio, evidence_of(traces, exact=grads))
            assert verdict.status == status

    def test_an_inf_is_found_where_eager_is_finite(self) -> None:
        got = self.eager.copy()
        got[3, 4] = np.inf
        verdict = self.judge(got)
        assert (verdict.symptom, verdict.at.index) == ("not finite", (3, 4))

    def test_a_result_that_eager_lost_is_inconclusive(self) -> None:
        lost = self.eager + np.float32(0.75)
        assert self.judge(self.eager * 100, eager=lost).status == "inconclusive"
        broken = self.eager.copy()
        broken[0, 0] = np.nan
        assert self.judge(self.eager * 100, eager=broken).status == "inconclusive"

    def test_one_linear_has_bounds_and_a_random_model_no_twin(self) -> None:
        far = self.eager * 100
        assert self.judge(far, model="linear").status == "not_applicable"
        traces = {
            "eager": Trace("", {"output": self.eager}),
            "inductor": Trace("", {"output": far}),
        }
        assert statuses(check_ratio, evidence_of(traces)) == ["not_applicable"]

    @pytest.mark.parametrize(
        ("optimizer", "name", "status"),
        [("adamw", "a.weight", "ok"), ("adamw", "a.weight.grad", "diverged"),
         ("adamw", "a.weight.exp_avg", "diverged"), ("sgd", "a.weight", "diverged")],
    )  # fmt: skip
    def test_a_parameter_that_adamw_moved_by_noise_is_not_judged(
        self, optimizer: str, name: str, status: str
    ) -> None:
        """One element whose gradient is noise, and of the other sign, is off by two steps."""
        exact = {name: self.exact * 2.0**-9, "output": self.exact}
        eager = exact[name].astype(np.float32)
        got = eager.copy()
        got[3, 4] += 2 * OPTIMIZERS["adamw"][1]["lr"]
        traces = {"eager": Trace("", {name: eager, "output": self.eager}),
                  "inductor": Trace("", {name: got, "output": self.eager})}  # fmt: skip
        (verdict,) = found(check_ratio, evidence_of(traces, exact=exact, optimizer=optimizer))
        assert verdict.status == status
        got[3, 4] = np.nan
        (verdict,) = found(check_ratio, evidence_of(traces, exact=exact, optimizer=optimizer))
        assert verdict.symptom == "not finite", "that is no noise"

    def test_exact_agreement_needs_no_ratio(self) -> None:
        """Eager without any error still leaves the compiled arm its roundings."""
        exact = self.exact.astype(np.float32)
        got = exact + np.float32(2.0**-9)
        assert self.judge(got, eager=exact).status == "ok"
        assert self.judge(exact + np.float32(2.0**-5), eager=exact).status == "diverged"


@pytest.mark.parametrize(
    ("lifecycle", "layout", "status"),
    [
        ("deepcopy", "strided", "not_applicable"),
        ("deepcopy", "contiguous", "ok"),
        ("none", "strided", "ok"),
    ],
)
def test_a_reload_into_another_memory_layout_is_not_compared(
    lifecycle: Any, layout: Any, status: str
) -> None:
    """A deep copy has dense weights, and torch's fp16 kernels may add up in another order."""
    spec = Spec(recipe="torch.fp16", dtype="fp16", m=16, k=8, n=16,
                lifecycle=lifecycle, weight_layout=layout)  # fmt: skip
    judgement = Judge(recipes(), Ledger([])).judge(Case(spec=spec, data=DataSpec(seed=4)))
    assert {v.status for v in judgement.verdicts if v.rule == "R20"} == {status}
    assert not judgement.causes
