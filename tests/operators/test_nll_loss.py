"""Losses of rows of classes: torch's kernels are inside the bound in fp32, in narrow dtypes a CPU's
do what the deviation says, to the bit; wrong ones are seen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

KNOWN = {"nll_loss_narrow_sums": "an-entry"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def calls_of(
    dtype: str,
    rows: int,
    classes: int,
    reduction: str = "mean",
    *,
    weighted: bool = False,
    ignored: int = 3,
) -> tuple[OperatorCall, OperatorCall]:
    """Of cross_entropy, where every ``ignored``-th target is ignored."""
    make = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, classes, generator=make) * 3).to(DTYPES[dtype]).requires_grad_()
    target = torch.randint(classes, (rows,), generator=make)
    if ignored:
        target[::ignored] = -100
    weight = torch.rand(classes, generator=make).to(DTYPES[dtype]) if weighted else None
    watch = OperatorWatch()
    with watch:
        loss = F.cross_entropy(x, target, weight, reduction=reduction)
        loss.backward(torch.full_like(loss, 0.75))
    forward, backward = (
        call for call in operators_of(watch.operators) if call.operator.startswith("nll_loss")
    )
    return forward, backward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_bounds_hold_but_for_what_is_known(dtype: str, weighted: bool, reduction: str) -> None:
    for (rows, classes), ignored in itertools.product(((1, 7), (33, 10), (700, 3)), (0, 3)):
        if rows == 1 and ignored:
            continue  # all are
        for call in calls_of(dtype, rows, classes, reduction, weighted=weighted, ignored=ignored):
            for verdict in judge_call("eager", call, None, KNOWN):
                assert verdict.status in ("ok", "known", "inconclusive"), (rows, verdict.got)
                assert verdict.status != "known" or dtype != "fp32"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_narrow_sums_are_followed_to_the_bit(dtype: str, weighted: bool) -> None:
    operator = BY_NAME["nll_loss"]
    for rows, reduction in itertools.product((2, 17, 300, 5000), ("mean", "sum")):
        forward, _ = calls_of(dtype, rows, 5, reduction, weighted=weighted, ignored=7)
        may = operator.deviations[0].expected(forward)["output"]
        assert may.lo == forward.outputs["output"], (rows, reduction)


def test_a_long_sum_in_bf16_is_a_finding_without_the_ledger() -> None:
    forward, _ = calls_of("bf16", 5000, 50, "sum")
    (verdict, *_) = judge_call("eager", forward)
    assert verdict.status == "diverged"
    assert "reduction 'sum'" in verdict.remark
    (known, *_) = judge_call("eager", forward, None, KNOWN)
    assert known.status == "known"
    spoilt = replace(forward, outputs={**forward.outputs, "output": forward.outputs["output"] * 2})
    (neighbour, *_) = judge_call("eager", spoilt, None, KNOWN)
    assert neighbour.status == "diverged"


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_kernels_are_seen(dtype: str) -> None:
    forward, backward = calls_of(dtype, 30, 10)
    counted = forward.outputs["output"] * np.float32(20 / 30)  # ignored rows in the mean
    total = forward.outputs["total_weight"] + np.float32(1.0)
    for name, wrong in (("output", counted), ("total_weight", total)):
        spoilt = replace(forward, outputs={**forward.outputs, name: wrong})
        found = [v for v in judge_call("eager", spoilt, None, KNOWN) if v.status == "diverged"]
        assert [v.at.result for v in found] == [name]
    grad = backward.outputs["grad_input"].copy()
    grad[0, 4] = 0.125  # that row is ignored
    (verdict,) = judge_call("eager", replace(backward, outputs={"grad_input": grad}))
    assert (verdict.status, verdict.at.index) == ("diverged", (0, 4))


def test_a_kernel_may_round_once_where_the_quotient_is_subnormal() -> None:
    """Of 256 rows it is, in fp16: half of its last place, times a weight of 5, is more than the
    result's own."""
    x = torch.zeros(256, 4, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([5.0, 1.0, 3.0, 0.3], dtype=torch.float16)
    dy = torch.tensor(0.0018, dtype=torch.float16)
    watch = OperatorWatch()
    with watch:
        loss = F.nll_loss(x, torch.arange(256) % 4, weight)
        loss.backward(dy)
    (backward,) = (c for c in operators_of(watch.operators) if c.operator == "nll_loss_backward")
    assert {v.status for v in judge_call("eager", backward)} == {"ok"}
    total, grad = backward.tensors["total_weight"], backward.outputs["grad_input"]
    once = -weight.double() * float(dy) / float(total)
    grad = grad.copy()
    rows = np.arange(256)
    grad[rows, rows % 4] = once[rows % 4].half().float().numpy()
    assert (grad != backward.outputs["grad_input"]).any()
    of_once = replace(backward, outputs={"grad_input": grad})
    assert {v.status for v in judge_call("eager", of_once)} == {"ok"}
    of_twice = replace(backward, outputs={"grad_input": grad * np.float32(2.0)})
    assert {v.status for v in judge_call("eager", of_twice)} == {"diverged"}
