"""Batched products: torch's are inside the bound in every dtype, forward and backward; wrong ones
are seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = ((1, 1, 1, 1), (3, 5, 7, 2), (4, 33, 65, 17), (2, 16, 128, 64))


def calls_of(a: torch.Tensor, b: torch.Tensor) -> tuple[OperatorCall, ...]:
    """Forward, and both gradients."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    with OperatorWatch() as watch:
        y = torch.bmm(a, b)
        y.backward(torch.ones_like(y))
    return operators_of(watch.operators)


def drawn(dtype: str, batch: int, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(k)
    a = torch.randn(batch, m, k, generator=make).to(DTYPES[dtype])
    b = torch.randn(batch, n, k, generator=make).to(DTYPES[dtype]).transpose(1, 2)
    return a, b


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_inside_their_bounds(dtype: str, shape: tuple[int, int, int, int]) -> None:
    a, b = drawn(dtype, *shape)
    for scale in (1.0, 2.0**-12, 300.0):
        calls = calls_of(a * scale, b)
        assert [call.phase for call in calls] == ["forward", "backward", "backward"]
        for call in calls:
            (verdict,) = judge_call("eager", call)
            assert verdict.status == "ok", (verdict.got, verdict.expect)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_product_more_or_less_is_seen(dtype: str) -> None:
    call = calls_of(*drawn(dtype, 2, 16, 64, 8))[0]
    a, b = (call.tensors[name].astype(np.float64) for name in ("input", "mat2"))
    for wrong in (a[:, :, 1:] @ b[:, 1:], a @ b[::-1], a @ b + a[:, :, :1] * b[:, :1]):
        bad = replace(call, outputs={"output": wrong.astype(np.float32)})
        (verdict,) = judge_call("eager", bad)
        assert verdict.status == "diverged"
        assert "torch.bmm of " in verdict.remark and "[2, 16, 64] and [2, 64, 8]" in verdict.remark


def test_whole_numbers_leave_nothing_to_round() -> None:
    a = torch.arange(32.0).reshape(1, 4, 8)
    call = calls_of(a, a.transpose(1, 2))[0]
    may = BY_NAME["bmm"].expected(call)["output"]
    assert (may.lo == may.hi).all() and (may.lo == call.outputs["output"]).all()
    off = replace(call, outputs={"output": np.nextafter(call.outputs["output"], np.float32(1e9))})
    (verdict,) = judge_call("eager", off)
    assert verdict.status == "diverged"


def test_what_overflows_and_what_is_no_number_is_left_open() -> None:
    a, b = drawn("fp16", 2, 4, 8, 4)
    b[1, 0, 0] = float("nan")
    may = BY_NAME["bmm"].expected(calls_of(a, b)[0])["output"]
    assert not may.unknown[0].any() and may.unknown[1].all()
    assert BY_NAME["bmm"].expected(calls_of(a * 3e4, b)[0])["output"].unknown.any()


def test_too_many_products_are_said_to_be() -> None:
    a, b = torch.ones(1, 1, 2049), torch.ones(1, 2049, 2049)
    with OperatorWatch() as watch:
        torch.bmm(a, b)
    assert not watch.operators
    assert watch.unjudged["batched products"].startswith("more than 2^22 products")


def test_a_gpu_aligns_to_what_a_subnormal_factor_would_be_if_it_were_normal() -> None:
    """Numbers of fp16 that an H200 multiplied: 459.4956 units of 2^-24 became 460, for it added up
    multiples of 1/16 of a unit."""
    a = np.float32(
        [0.6455078125, -0.322998046875, 1.7138671875, 460.0, -1.1767578125, 1.2841796875,
         0.449462890625, 0.5400390625, 1.15625, -0.36474609375, -1.02734375]
    )  # fmt: skip
    b = np.float32([17, 2, 1, 1, 3, -3, 8, -0.0, 1, 30, -1]) * np.float32(2.0**-24)
    dtypes = dict.fromkeys(("input", "mat2", "output"), "fp16")
    for device, may_be in (("cuda", True), ("cpu", False)):
        output = np.float32([[[460 * 2.0**-24]]])
        call = OperatorCall(
            "bmm", "forward", 0, {"input": a[None, None], "mat2": b[None, :, None]},
            {"output": output}, dtypes, {}, {}, device=device,
        )  # fmt: skip
        may = BY_NAME["bmm"].expected(call)["output"]
        assert (may.lo <= output <= may.hi) == may_be
        assert not may.lo <= output + 2.0**-24 <= may.hi
