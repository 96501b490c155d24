"""Layer norms: torch's kernels are inside the bounds but where they are known to be wrong, and then
they do what the deviation says, to the bit; wrong ones are seen beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.play.kernels import on_threads
from narrowfuzz.rules.expected import outside
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

KNOWN = {"layer_norm_narrow_sums": "an-entry"}
#: Of the input, and of the parameters.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "autocast": (torch.bfloat16, torch.float32),
}
#: Shape, and over how many of its dimensions is normalised.
SHAPES = (
    ((64, 300), 1),
    ((3, 7, 16), 1),
    ((5, 8, 12), 2),
    ((1, 33), 1),
    ((200, 5), 1),
    ((0, 8), 1),
)
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "small": lambda x: x * 1e-4,
    "large": lambda x: x * 1e4,
    "far from zero": lambda x: x + 1000,
    "equal": lambda x: x * 0 + 3,
    "zeros": lambda x: x * 0,
    "tiny": lambda x: x * 1e-30,
    "one outlier": lambda x: torch.where(x > 2.0, x + 3000, x),
}


def calls(
    shape: tuple[int, ...], dims: int, dtype: str, values: str, *, ones: bool = False
) -> list[OperatorCall]:
    """The forward and the backward of one layer norm."""
    make, (given, parameters) = torch.Generator().manual_seed(1), DTYPES[dtype]
    x = VALUES[values](torch.randn(shape, generator=make)).to(given).requires_grad_()
    over = shape[-dims:]
    weight, bias = (
        torch.randn(over, generator=make).to(parameters).requires_grad_() for _ in range(2)
    )
    dy = torch.ones(shape) if ones else torch.randn(shape, generator=make)
    watch = OperatorWatch()
    with watch:
        F.layer_norm(x, over, weight, bias).backward(dy.to(given))
    return list(operators_of(watch.operators))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_the_bounds_hold_but_for_what_is_known(dtype: str, values: str) -> None:
    for shape, dims in SHAPES:
        forward, backward = calls(shape, dims, dtype, values)
        assert set(forward.outputs) == {"output", "mean", "rstd"}
        said = [*judge_call("eager", forward), *judge_call("eager", backward, None, KNOWN)]
        assert all(v.status in ("ok", "known", "inconclusive") for v in said), (shape, said)
        known = {v.at.result for v in said if v.status == "known"}
        assert known <= ({"grad_weight", "grad_bias"} if dtype != "fp32" else set())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "autocast"])
def test_narrow_sums_are_followed_to_the_bit(dtype: str) -> None:
    _, backward = calls((1000, 70), 1, dtype, "plain")
    (deviation,) = BY_NAME["layer_norm_backward"].deviations
    may = deviation.expected(backward)["grad_bias"]
    assert (may.lo == may.hi).all() and (may.lo == backward.outputs["grad_bias"]).all()
    statuses = {v.at.result: v.status for v in judge_call("eager", backward)}
    assert statuses["grad_bias"] == "diverged", "without the ledger it is a finding"


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 16, 100])
def test_narrow_sums_of_several_threads_are_followed_to_the_bit(threads: int, rows: int) -> None:
    with on_threads(threads):
        _, backward = calls((rows, 70), 1, "bf16", "plain")
    (deviation,) = BY_NAME["layer_norm_backward"].deviations
    may = deviation.expected(backward)["grad_bias"]
    assert (may.lo == may.hi).all() and (may.lo == backward.outputs["grad_bias"]).all()
    assert all(v.status != "diverged" for v in judge_call("eager", backward, None, KNOWN))


def test_ones_add_up_to_the_number_of_rows_and_in_bf16_to_256() -> None:
    _, right = calls((4096, 4), 1, "fp32", "plain", ones=True)
    may = BY_NAME["layer_norm_backward"].expected(right)["grad_bias"]
    assert (may.lo == 4096.0).all() and (may.hi == 4096.0).all()
    _, stalled = calls((4096, 4), 1, "autocast", "plain", ones=True)
    verdict = next(v for v in judge_call("eager", stalled) if v.at.result == "grad_bias")
    assert (verdict.status, verdict.got) == ("diverged", "256")
    assert verdict.remark == (
        "grad_bias of the backward of torch.layer_norm of a bfloat16 tensor of [4096, 4] over [4] "
        "is wrong"
    )


def test_a_narrow_sum_that_overflows_is_what_is_known() -> None:
    dy = torch.full((40, 4), 4e3, dtype=torch.float16)
    bias = torch.zeros(4, requires_grad=True)
    watch = OperatorWatch()
    with watch:
        F.layer_norm(torch.randn(40, 4).half(), (4,), torch.ones(4), bias).backward(dy)
    (call,) = (c for c in operators_of(watch.operators) if "grad_bias" in c.outputs)
    assert np.isinf(call.outputs["grad_bias"]).all(), "the sum of fp32 parameters is 160000"
    (known,) = judge_call("eager", call, None, KNOWN)
    (new,) = judge_call("eager", call)
    assert (known.status, new.status, new.symptom) == ("known", "diverged", "not finite")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("fault", "values", "wrong"),
    [
        ("layer-norm-gradient-drops-rows", "plain", {"grad_weight", "grad_bias"}),
        ("layer-norm-counts-padding", "far from zero", {"output", "rstd"}),
    ],
)
def test_another_bug_is_seen_beside_what_is_known(
    dtype: str, fault: str, values: str, wrong: set[str]
) -> None:
    with builtin_faults()[fault].plant():
        both = calls((37, 48), 1, dtype, values)
    said = [v for call in both for v in judge_call("eager", call, None, KNOWN)]
    assert {v.at.result for v in said if v.status == "diverged"} == wrong


@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_an_element_that_is_off_by_little_more_than_the_bound_is_seen(name: str) -> None:
    (call,) = (c for c in calls((33, 40), 1, "fp32", "plain") if name in c.outputs)
    may = BY_NAME[call.operator].expected(call)[name]
    assert not outside(may, call.outputs[name]).any()
    assert float((may.radius / np.maximum(np.abs(may.centre), 1.0)).max()) < 1e-4
    wrong = call.outputs[name].copy()
    wrong[5, 7] += 1.01 * (may.hi[5, 7] - may.lo[5, 7])
    assert outside(may, wrong)[5, 7] and outside(may, wrong).sum() == 1


@pytest.mark.parametrize("shape", [(0,), (4, 0)], ids=str)
def test_rows_without_elements_are_not_judged(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    with OperatorWatch() as watch:
        F.layer_norm(x, (0,)).sum().backward()
    calls = [c for c in operators_of(watch.operators) if c.operator.startswith("layer_norm")]
    assert len(calls) == 2
    for call in calls:
        (verdict,) = judge_call("eager", call)
        assert (verdict.status, verdict.why) == ("inconclusive", "rows without elements")


def test_a_norm_without_parameters_and_one_of_frozen_ones_are_read() -> None:
    watch = OperatorWatch()
    x = torch.randn(4, 6, requires_grad=True)
    frozen: Any = torch.nn.LayerNorm(6).requires_grad_(False)
    with watch:
        F.layer_norm(x, (6,)).backward(torch.randn(4, 6))
        frozen(x).backward(torch.randn(4, 6))
    found = operators_of(watch.operators)
    backwards = [call for call in found if call.operator == "layer_norm_backward"]
    assert [sorted(call.outputs) for call in backwards] == [["grad_input"], ["grad_input"]]
    assert all(v.status == "ok" for call in found for v in judge_call("eager", call))


def test_what_is_flushed_with_the_cube_of_rstd_counts() -> None:
    make = torch.Generator().manual_seed(3)
    x = (torch.randn(64, 64, generator=make) * 2.0**40).requires_grad_()
    dy = torch.randn(64, 64, generator=make) * 2.0**-80
    watch = OperatorWatch()
    with watch:
        F.layer_norm(x, (64,)).backward(dy)
    call = operators_of(watch.operators)[-1]
    found = BY_NAME[call.operator].expected(call)["grad_input"]
    assert not outside(found, call.outputs["grad_input"]).any()
    # many are further off than roundings explain
    off = np.abs(call.outputs["grad_input"] - found.centre)
    assert (off > 2.0**-16 * np.abs(found.centre)).any()
