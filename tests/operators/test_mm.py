"""Products outside of linears: torch's are inside the bound in every dtype, forward and backward;
wrong ones are seen, and none is a linear's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import EagerWatch, GraphWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.play.running import Running
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = ((1, 1, 1), (5, 7, 2), (33, 65, 17), (16, 128, 64))


def calls_of(
    dtype: str, shape: tuple[int, int, int], bias: bool, scale: float = 1.0
) -> tuple[OperatorCall, ...]:
    """Forward, and both gradients."""
    m, k, n = shape
    make = torch.Generator().manual_seed(k)
    a, w, b = (torch.randn(*size, generator=make) for size in ((m, k), (n, k), (n,)))
    of = [(t * scale).to(DTYPES[dtype]).requires_grad_() for t in (a, w, b)]
    with EagerWatch() as watch:
        y = F.linear(of[0], of[1], of[2] if bias else None)
        y.backward(torch.ones_like(y))
    return operators_of(watch.operators)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_inside_their_bounds(
    dtype: str, shape: tuple[int, int, int], bias: bool
) -> None:
    for scale in (1.0, 2.0**-8, 10.0):
        calls = [c for c in calls_of(dtype, shape, bias, scale) if c.operator != "sum"]
        assert [c.operator for c in calls] == ["addmm" if bias else "mm", "mm", "mm"]
        for call in calls:
            (verdict,) = judge_call("eager", call)
            assert verdict.status == "ok", (verdict.got, verdict.expect, verdict.remark)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_products_are_seen(dtype: str, bias: bool) -> None:
    call = calls_of(dtype, (16, 64, 8), bias)[0]
    a, b = (call.tensors[name].astype(np.float64) for name in ("input", "mat2"))
    added = call.tensors["bias"].astype(np.float64) if bias else 0.0
    for wrong in (a[:, 1:] @ b[1:] + added, a @ b[::-1] + added, a @ b + added + a[:, :1]):
        bad = replace(call, outputs={"output": wrong.astype(np.float32)})
        (verdict,) = judge_call("eager", bad)
        assert verdict.status == "diverged"
        assert "mm of " in verdict.remark and "[16, 64] and [64, 8]" in verdict.remark
    if bias:
        (verdict,) = judge_call("eager", replace(call, outputs={"output": np.float32(a @ b)}))
        assert verdict.status == "diverged"


def test_a_bias_may_be_added_before_or_after_rounding() -> None:
    """1 + 2^-8 of a product is 1 in bf16, to which 2^-8 is added; 1 + 2^-7 is what both are."""
    call = calls_of("bf16", (1, 2, 1), bias=True)[0]
    tensors = {
        "bias": np.float32([2.0**-8]),
        "input": np.float32([[1.0, 2.0**-8]]),
        "mat2": np.float32([[1.0], [1.0]]),
    }
    may = BY_NAME["addmm"].expected(replace(call, tensors=tensors))["output"]
    assert (may.lo[0, 0], may.hi[0, 0]) == (1.0, 1.0 + 2.0**-7)


def test_a_kernel_may_begin_with_the_bias() -> None:
    """2^24 and then 0.5 ten times are 2^24; from the other end they are 2^24 + 4."""
    call = calls_of("fp32", (1, 10, 1), bias=True)[0]
    tensors = {
        "bias": np.float32([2.0**24]),
        "input": np.full((1, 10), 0.5, np.float32),
        "mat2": np.ones((10, 1), np.float32),
    }
    may = BY_NAME["addmm"].expected(replace(call, tensors=tensors))["output"]
    assert may.lo[0, 0] <= 2.0**24 and may.hi[0, 0] >= 2.0**24 + 4.0


def test_of_large_calls_some_rows_and_columns_are_judged() -> None:
    for call in calls_of("bf16", (300, 128, 512), bias=True):
        may = BY_NAME[call.operator].expected(call)["output"]
        (verdict,) = judge_call("eager", call)
        assert verdict.status == "ok"
        if call.operator != "sum":
            assert 0 < (~may.unknown).sum() < may.unknown.size / 2


def test_products_of_linears_are_left_to_their_layer() -> None:
    """The head shares the first linear's weight, and is none; all is recomputed once."""
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 8), "down": torch.nn.Linear(8, 8)})
    running = Running()
    running.follow(model)
    x = torch.randn(4, 8, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = model["down"](model["up"](x) @ torch.eye(8))
        return F.linear(hidden, model["up"].weight)

    plain: Callable[[], torch.Tensor] = lambda: forward(x)  # noqa: E731
    again: Callable[[], torch.Tensor] = lambda: checkpoint(  # noqa: E731
        forward, x, use_reentrant=False
    )
    for run, forwards in ((plain, 2), (again, 4)):
        with EagerWatch(running) as watch, set_checkpoint_early_stop(False):
            watch.linears = ["up", "down"]
            run().sum().backward()
        called = [c for c in operators_of(watch.operators) if c.operator in ("mm", "addmm")]
        assert not any(c.operator == "addmm" for c in called)
        # of the eye no gradient is asked for
        assert len(called) == forwards + 3
        assert all(v.status == "ok" for c in called for v in judge_call("eager", c))


def test_compiled_products_are_judged_otherwise() -> None:
    with GraphWatch() as watch:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert not watch.operators and len(watch.products) == 1


def test_what_is_added_with_a_factor_is_not_judged() -> None:
    a = torch.ones(4, 4)
    with EagerWatch() as watch:
        torch.addmm(a, a, a)
        torch.addmm(a[0], a, a, alpha=2)
    assert not watch.operators
    assert watch.unjudged["products of matrices with a bias"].endswith("with a factor")
