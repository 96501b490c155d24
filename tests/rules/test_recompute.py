"""Recomputes on traces made by hand: each must repeat the forward that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from narrowfuzz.numerics.formats import F32
from narrowfuzz.rules.recompute import check_checkpoint, check_recompute
from narrowfuzz.trace.trace import LayerCall, Multiplied, Seen, Site, SiteTrace, Trace
from narrowfuzz.trace.verdict import Verdict
from test_rules_of_models import (
    ROWWISE,
    as_seen,
    call,
    evidence_of,
    found,
    multiplied,
    numbers,
    outputs,
    quantised,
    statuses,
)


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
