"""Means: torch's are inside the bound in every dtype, over any dimensions; wrong ones are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def call_of(x: torch.Tensor, *how: Any, **named: Any) -> OperatorCall:
    with OperatorWatch() as watch:
        x.mean(*how, **named)
    (call,) = operators_of(watch.operators)
    return call


def drawn(dtype: str, *shape: int, size: float = 1.0) -> torch.Tensor:
    make = torch.Generator().manual_seed(len(shape))
    return ((torch.randn(*shape, generator=make) + 0.5) * size).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_means_are_inside_their_bounds(dtype: str, size: float) -> None:
    for shape, how in (((33, 65), (-1,)), ((5, 4, 7), ((0, 2), True)), ((3, 700), ())):
        (verdict,) = judge_call("eager", call_of(drawn(dtype, *shape, size=size), *how))
        assert verdict.status == "ok", (shape, how, verdict.got, verdict.expect)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_term_more_or_less_is_seen(dtype: str) -> None:
    call = call_of(drawn(dtype, 9, 40), -1, keepdim=True)
    for wrong in (40 / 48, 40 / 39):
        bad = replace(call, outputs={"output": call.outputs["output"] * wrong})
        (verdict,) = judge_call("eager", bad)
        assert verdict.status == "diverged"
        assert "mean over dim 1 of a " in verdict.remark


def test_fp16_means_are_not_summed_in_fp16() -> None:
    call = call_of(drawn("fp16", 2, 700, size=300.0), -1)
    overflown = replace(call, outputs={"output": call.outputs["output"] * float("inf")})
    (verdict,) = judge_call("eager", overflown)
    assert verdict.status == "diverged"


def test_nothing_is_said_where_another_dtype_is_asked_for() -> None:
    with OperatorWatch() as watch:
        drawn("bf16", 2, 7).mean(-1, dtype=torch.float32)
    assert not watch.operators
