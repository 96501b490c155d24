"""Results of whole models: where bits are promised, and how far those of a compiler may be off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from narrowfuzz.case.spec import OPTIMIZERS, Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics.formats import F32
from narrowfuzz.rules.whole import check_ratio, check_strict
from narrowfuzz.trace.address import At
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict
from samples import recipes
from test_rules_of_models import evidence_of, found, numbers, outputs, statuses


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
