"""Softmax and its logarithm: torch's kernels are inside the bounds, wrong ones are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.plants.operators import changed
from narrowfuzz.rules.expected import outside
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

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
    with changed(kernel, fault):
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
