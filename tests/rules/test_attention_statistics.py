"""O18 on calls made by hand: attention's backward gets its own forward's output and log-sum-exp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.operators.attention_statistics import OFF_BESIDE_A_MASK
from narrowfuzz.play.attention_scores import scores
from narrowfuzz.play.check import statistics
from narrowfuzz.play.watches import Attended
from narrowfuzz.rules.recompute import check_statistics, softmax_excess
from narrowfuzz.trace.expect import read
from narrowfuzz.trace.trace import AttentionCall, Trace
from narrowfuzz.trace.verdict import Verdict
from test_rules_of_models import evidence_of, found, numbers

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
