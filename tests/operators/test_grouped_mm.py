"""Products of groups: torch's are inside the bound in every dtype, forward and backward, whatever
the groups; wrong ones are seen, and what is no group's is left open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.play.group_models import GroupedProducts, group_ends
from narrowfuzz.play.groups import grouped
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Where groups end, of so many rows.
GROUPS = {
    "one": ((33,), 33),
    "empty": ((0, 0, 17, 17), 17),
    "uneven": ((1, 1, 17, 34, 162), 162),
    "tail": ((15, 31, 32), 40),
}


def calls_of(
    dtype: str, ends: tuple[int, ...], rows: int, k: int = 32, n: int = 24, scale: float = 1.0
) -> tuple[OperatorCall, ...]:
    """Forward, and the gradients of rows and matrices; rows that are no group's hold NaN."""
    make = torch.Generator().manual_seed(rows)
    a, gradient = (torch.randn(rows, width, generator=make) * scale for width in (k, n))
    a[ends[-1] :] = gradient[ends[-1] :] = float("nan")
    a = a.to(DTYPES[dtype]).requires_grad_()
    w = torch.randn(len(ends), n, k, generator=make).to(DTYPES[dtype]).requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32)
    with OperatorWatch() as watch:
        y = torch._grouped_mm(a, w.transpose(1, 2), offs=offs)
        y.backward(gradient.to(DTYPES[dtype]))
    return operators_of(watch.operators)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", GROUPS)
def test_products_are_inside_their_bounds(dtype: str, groups: str) -> None:
    for scale in (1.0, 2.0**-12, 30.0):
        calls = calls_of(dtype, *GROUPS[groups], scale=scale)
        assert [call.phase for call in calls] == ["forward", "backward", "backward"]
        for call in calls:
            (verdict,) = judge_call("eager", call)
            assert verdict.status == "ok", (verdict.got, verdict.expect, verdict.remark)


def test_every_form_of_operands_is_read() -> None:
    a, b = torch.randn(3, 8, 16), torch.randn(3, 16, 8)
    offs = torch.tensor([0, 3, 8], dtype=torch.int32)
    with OperatorWatch() as watch:
        torch._grouped_mm(a, b)
        torch._grouped_mm(a, torch.randn(16, 8), offs=offs)
    equal, columns = operators_of(watch.operators)
    assert "offs" not in equal.tensors and "groups" not in BY_NAME["grouped_mm"].title(equal)
    for call in (equal, columns):
        (verdict,) = judge_call("eager", call)
        assert verdict.status == "ok"
        bad = replace(call, outputs={"output": call.outputs["output"][::-1]})
        (verdict,) = judge_call("eager", bad)
        assert verdict.status == "diverged"


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_groups_are_seen(dtype: str) -> None:
    forward, *backward = calls_of(dtype, (16, 16, 33), 33)
    moved = replace(forward, tensors={**forward.tensors, "offs": np.float32([17, 17, 33])})
    (verdict,) = judge_call("eager", moved)
    assert verdict.status == "diverged" and verdict.at.index[0] == 16
    assert "grouped_mm of " in verdict.remark and "groups up to 17, 17, 33" in verdict.remark
    weight = next(call for call in backward if call.outputs["output"].ndim == 3)
    output = weight.outputs["output"].copy()
    assert not output[1].any()
    output[1, 0, 0] = 2.0**-20
    (verdict,) = judge_call("eager", replace(weight, outputs={"output": output}))
    assert verdict.status == "diverged" and verdict.at.index == (1, 0, 0)


def test_rows_of_no_group_are_left_open_and_reach_nothing() -> None:
    forward, *backward = calls_of("bf16", (15, 31, 32), 40)
    may = BY_NAME["grouped_mm"].expected(forward)["output"]
    assert may.unknown[32:].all() and not may.unknown[:32].any()
    weight = next(call for call in backward if call.outputs["output"].ndim == 3)
    assert not BY_NAME["grouped_mm"].expected(weight)["output"].unknown.any()


def test_of_large_calls_some_rows_are_judged() -> None:
    for call in calls_of("bf16", (100, 100, 900, 1024), 1024, k=128, n=256):
        may = BY_NAME["grouped_mm"].expected(call)["output"]
        known = ~may.unknown
        assert 0 < known.sum() < known.size / 2
        (verdict,) = judge_call("eager", call)
        assert verdict.status == "ok"


def test_offsets_that_mean_nothing_are_said_to_be() -> None:
    a, b = torch.ones(8, 8), torch.ones(2, 8, 8)
    for ends in ([5, 3], [4, 9], [-1, 8]):
        with OperatorWatch() as watch:
            torch._grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32))
        assert not watch.operators
        assert "backwards, or beyond the end" in watch.unjudged["products of groups"]


def test_the_model_shares_all_rows_and_hides_the_others() -> None:
    model, cpu = GroupedProducts(5, 4, (1, 0, 16), 3), torch.device("cpu")
    assert group_ends(4, (1, 0, 16), 20, cpu).tolist() == [1, 1, 17, 20]
    assert group_ends(4, (1, 0, 16), 3, cpu).tolist() == [1, 1, 3, 3]
    x = torch.randn(20, 5, requires_grad=True)
    y = model(x)
    y.backward(torch.ones_like(y))
    assert all(bool(t.isfinite().all()) for t in (y, x.grad, model.up.grad, model.down.grad))
    exact = model.double()(x.detach().double())
    assert torch.allclose(y.double(), exact, rtol=1e-4, atol=1e-4)


def test_in_float64_each_group_is_multiplied_by_itself() -> None:
    a, b = torch.randn(6, 8), torch.randn(3, 8, 8)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    wide = grouped(a.double(), b.double(), offs)
    assert torch.allclose(wide[:5].float(), grouped(a, b, offs)[:5], atol=1e-4)
    assert not wide[5:].any()
