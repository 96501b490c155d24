"""Softmax and its logarithm: torch's kernels are inside the bounds, wrong ones are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.plants.operators import kernel_replaced
from narrowfuzz.rules.expected import outside
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = (
    ((64, 300), -1),
    ((3, 7, 16), 1),
    ((5, 8, 12), 0),
    ((200, 5), 0),
    ((4, 1), 1),
    ((0, 8), 1),
)
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "far apart": lambda x: x * 2500,
    "equal": lambda x: x * 0 + 3,
    "far from zero": lambda x: x + 1e4,
    "masked": lambda x: torch.where(x > 0.5, -torch.inf, x),
    "masked by a number": lambda x: torch.where(x > 0.5, -1e9, x),
}
FUNCTIONS: dict[str, Any] = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}


def calls(
    name: str, shape: tuple[int, ...], dim: int, dtype: str, values: str
) -> list[OperatorCall]:
    make = torch.Generator().manual_seed(1)
    x = VALUES[values](torch.randn(shape, generator=make)).to(DTYPES[dtype]).requires_grad_()
    dy = torch.randn(shape, generator=make).to(DTYPES[dtype])
    watch = OperatorWatch()
    with watch:
        FUNCTIONS[name](x, dim).backward(dy)
    return [call for call in operators_of(watch.operators) if call.operator.startswith(name)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_the_bounds_hold(name: str, dtype: str, values: str) -> None:
    for shape, dim in SHAPES:
        both = calls(name, shape, dim, dtype, values)
        assert len(both) == 2
        said = [v for call in both for v in judge_call("eager", call)]
        assert all(v.status in ("ok", "inconclusive") for v in said), (shape, said)
        if values == "plain" and shape[0] and shape[dim] > 1:
            assert [v.status for v in said] == ["ok", "ok"]


#: Numbers that models add to the scores of masked keys, or fill them with.
MASKS = {
    "least of fp32": torch.finfo(torch.float32).min,
    "least of bf16": torch.finfo(torch.bfloat16).min,
    "-1e10": -1e10,
    "-1e9": -1e9,
    "-inf": -torch.inf,
}


@pytest.mark.parametrize("mask", MASKS)
def test_probabilities_beside_masked_scores_are_judged(mask: str) -> None:
    scores = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    ahead = torch.ones(8, 8, dtype=torch.bool).triu(1)
    with OperatorWatch() as watch:
        x = scores.masked_fill(ahead, MASKS[mask])
        torch.softmax(x, -1)
        torch.log_softmax(x, -1)
        torch.logsumexp(x, -1)
    judged = [c for c in operators_of(watch.operators) if c.operator in {*FUNCTIONS, "logsumexp"}]
    assert len(judged) == 3
    for call in judged:
        (expected,) = BY_NAME[call.operator].expected(call).values()
        if call.operator != "log_softmax" or mask != "-inf":  # its logarithms of 0 are unknown
            assert not expected.unknown.any()
        assert {v.status for v in judge_call("eager", call)} == {"ok"}
        wrong = call.outputs["output"].copy()
        wrong[5] = np.where(np.abs(wrong[5]) < 1e3, 1.1, 1.0) * wrong[5]
        (verdict,) = judge_call("eager", replace(call, outputs={"output": wrong}))
        assert verdict.status == "diverged" and verdict.at.index[0] == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_beside_masked_scores_are_inside(dtype: str) -> None:
    draw = torch.Generator().manual_seed(5)
    least = torch.finfo(DTYPES[dtype]).min
    for number in (least, least / 3, least * 0.999, max(-1e10, least), max(-1e9, least), -800.0):
        for scale in (1.0, 90.0, 3000.0, 60000.0):
            x = (torch.randn(16, 40, generator=draw) * scale).to(DTYPES[dtype]).clamp(least, -least)
            x = x.masked_fill(torch.rand(16, 40, generator=draw) < 0.5, number).requires_grad_()
            with OperatorWatch() as watch:
                for function in (torch.softmax, torch.log_softmax):
                    function(x, -1).backward(torch.randn(16, 40, generator=draw).to(x.dtype))
                torch.logsumexp(x, -1)
            for call in operators_of(watch.operators):
                said = list(judge_call("eager", call))
                assert all(v.status in ("ok", "inconclusive") for v in said), (number, scale, said)


def of_first_block(run: Any) -> Any:
    """Exponentials are divided by the sum of the first 32 alone (LeetCUDA#392)."""

    def forward(x: Any, dim: int, half: bool) -> Any:
        y = run(x, dim, half)
        return y / y.narrow(dim, 0, 32).sum(dim, keepdim=True)

    return forward


def logarithms_for_probabilities(run: Any) -> Any:
    """The sum of the gradients is multiplied by log-probabilities (MIOpen#112)."""
    return lambda dy, y, dim, dtype: dy - y * dy.sum(dim, keepdim=True)


@pytest.mark.parametrize(
    ("kernel", "fault", "name", "wrong"),
    [
        ("_softmax", of_first_block, "softmax", "softmax"),
        (
            "_log_softmax_backward_data",
            logarithms_for_probabilities,
            "log_softmax",
            "log_softmax_backward",
        ),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_kernel_is_seen(kernel: str, fault: Any, name: str, wrong: str, dtype: str) -> None:
    with kernel_replaced(kernel, fault):
        both = calls(name, (9, 40), 1, dtype, "plain")
    said = [v for call in both for v in judge_call("eager", call)]
    assert {v.role for v in said if v.status == "diverged"} == {wrong}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_of_fp32_are_no_wider_than_they_must_be(name: str) -> None:
    for call in calls(name, (33, 40), 1, "fp32", "plain"):
        ((result, may),) = BY_NAME[call.operator].expected(call).items()
        assert float((may.radius / np.maximum(np.abs(may.centre), 1.0)).max()) < 1e-4
        wrong = call.outputs[result].copy()
        wrong[5, 7] += 1.01 * (may.hi[5, 7] - may.lo[5, 7])
        assert outside(may, wrong)[5, 7] and outside(may, wrong).sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_logarithms_of_sums_are_inside_and_wrong_ones_are_not(dtype: str) -> None:
    make = torch.Generator().manual_seed(2)
    for rows, columns, dim in ((5, 1, 1), (7, 33, 0), (4, 600, -1)):
        for scale in (0.01, 1.0, 20.0, 3000.0):
            x = (torch.randn(rows, columns, generator=make) * scale).to(DTYPES[dtype])
            x[0, 0] = -float("inf")
            with OperatorWatch() as watch:
                torch.logsumexp(x, dim)
                torch.logsumexp(x, dim, keepdim=True)
            for call in operators_of(watch.operators):
                (verdict,) = judge_call("eager", call)
                assert verdict.status in ("ok", "inconclusive")
    x = torch.zeros(3, 256, dtype=DTYPES[dtype])
    with OperatorWatch() as watch:
        torch.logsumexp(x, 1)
    (call,) = operators_of(watch.operators)
    wrong = {"output": np.full(3, np.log(192.0), np.float32)}
    (verdict,) = judge_call("eager", replace(call, outputs=wrong))
    assert verdict.status == "diverged", "a quarter of the classes is left out"


def test_a_query_that_sees_nothing_has_probabilities_of_0() -> None:
    q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(4))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    with OperatorWatch() as watch, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    call = next(c for c in operators_of(watch.operators) if c.operator == "safe_softmax")
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "ok"
    for wrong in (np.nan, 0.25):
        output = call.outputs["output"].copy()
        output[0, 0, 2] = wrong
        (verdict,) = judge_call("eager", replace(call, outputs={"output": output}))
        assert verdict.status == "diverged" and verdict.at.index == (0, 0, 2, 0)
