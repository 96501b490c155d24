"""Activations and their gradients: torch's kernels are inside the bound for every dtype, length and
size of numbers; approximations and wrong derivatives are seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FUNCTIONS = {
    "exp": torch.exp,
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
SCALES = (1e-30, 1e-6, 1e-3, 0.1, 1.0, 3.0, 10.0, 80.0, 300.0, 5000.0)


def calls_of(
    name: str, x: torch.Tensor, dy: torch.Tensor | None = None
) -> tuple[OperatorCall, ...]:
    x = x.clone().requires_grad_()
    with OperatorWatch() as watch:
        y = FUNCTIONS[name](x)
        y.backward(torch.ones_like(y) if dy is None else dy.to(y.dtype))
    return operators_of(watch.operators)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torchs_kernels_are_inside(name: str, dtype: str) -> None:
    """Of lengths that fill vector registers, and that do not."""
    make = torch.Generator().manual_seed(0)
    for count in (1, 7, 16, 33, 1000):
        for scale in SCALES:
            x = (torch.randn(count, generator=make) * scale).to(DTYPES[dtype])
            calls = calls_of(name, x, torch.randn(count, generator=make))
            assert calls
            for call in calls:
                (verdict,) = judge_call("eager", call)
                assert verdict.status in ("ok", "inconclusive"), (count, scale, verdict.got)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_error_of_a_few_units_in_the_last_place_is_seen(name: str) -> None:
    x = torch.linspace(0.25, 3.0, 64)
    call = calls_of(name, x)[0]
    for factor in (1.0 + 2.0**-18, 1.0 - 2.0**-18):
        wrong = {"output": call.outputs["output"] * np.float32(factor)}
        (verdict,) = judge_call("eager", replace(call, outputs=wrong))
        assert verdict.status == "diverged"
        assert f"{BY_NAME[call.operator].title(call)} is wrong" == verdict.remark


def test_gelu_and_its_approximation_are_told_apart() -> None:
    x = torch.linspace(-4.0, 4.0, 65)
    exact, bent = (calls_of(name, x) for name in ("gelu", "gelu_tanh"))
    for one, other in zip(exact, bent, strict=True):
        for mine, theirs in ((one, other), (other, one)):
            (verdict,) = judge_call("eager", replace(mine, outputs=theirs.outputs))
            assert verdict.status == "diverged"
    assert "(approximate='tanh') of a float32 tensor of [65]" in BY_NAME["gelu"].title(bent[0])


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "silu", "gelu", "gelu_tanh"])
def test_a_gradient_of_another_derivative_is_seen(name: str) -> None:
    x = torch.linspace(-3.0, 3.0, 61)
    backward = calls_of(name, x)[-1]
    of = next(t for n, t in backward.tensors.items() if n != "grad_output")
    for wrong in (of, np.ones_like(of), backward.outputs["grad_input"][::-1] + np.float32(1e-3)):
        bad = replace(backward, outputs={"grad_input": wrong.astype(np.float32)})
        (verdict,) = judge_call("eager", bad)
        assert verdict.status == "diverged"


def test_what_is_not_finite_is_left_open_beside_what_is() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, 1e30])
    for name in ("silu", "gelu_tanh"):
        call = calls_of(name, x)[0]
        may = BY_NAME[call.operator].expected(call)["output"]
        assert may.unknown.tolist() == [True, True, True, False, True]
