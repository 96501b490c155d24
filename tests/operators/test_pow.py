"""Powers: torch's kernels are inside the bound, and a power by logarithms is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPONENTS = (0, 0.5, 1, 2, 3)


def calls_of(x: torch.Tensor, exponent: float) -> tuple[OperatorCall, ...]:
    """Of the power, and of what its gradient is made of."""
    x = x.clone().requires_grad_()
    with OperatorWatch() as watch:
        y = x.pow(exponent)
        y.backward(torch.ones_like(y))
    return tuple(call for call in operators_of(watch.operators) if call.operator == "pow")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_torchs_kernels_are_inside(exponent: float, dtype: str) -> None:
    """Of lengths that fill vector registers, and that do not."""
    make = torch.Generator().manual_seed(0)
    for count in (1, 7, 16, 33, 1000):
        for scale in (1e-30, 1e-20, 1e-6, 1e-3, 1.0, 300.0, 5000.0, 1e15, 1e30):
            x = (torch.randn(count, generator=make) * scale).to(DTYPES[dtype])
            if exponent == 0.5:
                x = x.abs()
            for call in calls_of(x, exponent):
                (verdict,) = judge_call("eager", call)
                assert verdict.status in ("ok", "inconclusive"), (count, scale, verdict.got)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_power_by_logarithms_is_seen(dtype: str) -> None:
    x = torch.linspace(-3.0, 3.0, 64).to(DTYPES[dtype])
    with builtin_faults()["power-by-logarithm"].plant():
        (verdict, *_) = judge_call("eager", calls_of(x, 2)[0])
    assert (verdict.status, verdict.symptom) == ("diverged", "wrong value")


def test_special_numbers() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3.4e38])
    (call, *_) = calls_of(x, 2)
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "ok"
    wrong = replace(call, outputs={"output": np.where(np.isnan(x), 0.0, call.outputs["output"])})
    (verdict,) = judge_call("eager", wrong)
    assert verdict.symptom == "NaN missing"


def test_what_the_c_library_computes_is_not_judged() -> None:
    with OperatorWatch() as watch:
        torch.ones(3).pow(2.5)
    assert watch.unjudged == {"powers": "with 2.5 as exponent"}
