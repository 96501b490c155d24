"""Vector norms: torch's kernels are inside the bound, exact ones are exact, wrong ones are seen."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators.vector_norm import OPERATOR
from narrowfuzz.rules.expected import outside
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.triage.script.operator import of_operator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ORDERS = (2.0, 1.0, math.inf)
#: Shape, dimensions, and whether they are kept.
SHAPES: list[tuple[tuple[int, ...], Any, bool]] = [
    ((33, 7), 0, True), ((4096, 3), 0, False), ((5, 300), 1, False), ((4, 9, 17), (0, 1), False),
    ((3, 50, 2, 40), (1, 3), True), ((20,), None, False), ((6, 5), None, True), ((), None, False),
    ((2, 3, 5), -1, True), ((3, 1), 1, False),
]  # fmt: skip
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.ndim else x,
}
#: Rows that bite, all of which must come out to the bit, and their norms of order 2.
EXACT = {
    "equal": ([2.0**-20] * 4, 2.0**-19),
    "equal, many": ([0.25] * 16384, 32.0),
    "zeros": ([0.0, -0.0, 0.0], 0.0),
    "three, four": ([3.0, -4.0, 0.0], 5.0),
    "a NaN": ([1.0, math.nan, math.inf, 2.0**60], math.nan),
    "an infinity": ([1.0, -math.inf, 2.0**60], math.inf),
}


def calls_of(function: Any, *args: Any, **kwargs: Any) -> tuple[OperatorCall, ...]:
    with OperatorWatch() as watch:
        function(*args, **kwargs)
    return operators_of(watch.operators)


def call_of(*args: Any, **kwargs: Any) -> OperatorCall:
    (call,) = calls_of(torch.linalg.vector_norm, *args, **kwargs)
    return call


def verdict_of(call: OperatorCall, **outputs: Any) -> Any:
    call = OperatorCall(**{**vars(call), "outputs": {**call.outputs, **outputs}})
    (verdict,) = judge_call("eager", call)
    return verdict


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_bound_holds_for_torch_whatever_the_shape_and_layout(
    dtype: str, layout: str, order: float
) -> None:
    make = torch.Generator().manual_seed(7)
    for (shape, dim, keeps), spread in itertools.product(SHAPES, (1.0, 1e4)):
        drawn = torch.randn(shape, generator=make)
        x = LAYOUTS[layout]((drawn * spread ** torch.rand(shape, generator=make)).to(DTYPES[dtype]))
        call = call_of(x, order, dim, keeps)
        (may,) = OPERATOR.expected(call).values()
        assert may.lo.shape == call.outputs["output"].shape
        assert not outside(may, call.outputs["output"]).any(), (shape, dim)
        assert not may.unknown.any()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_may_be_asked_for_in_fp32(dtype: str) -> None:
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    call = call_of(x, dim=1, dtype=torch.float32)
    assert call.dtypes == {"input": dtype, "output": "fp32"}
    assert verdict_of(call).status == "ok"
    narrowed = call.outputs["output"].copy()
    narrowed[2] *= 1.0 + 2.0**-12
    assert verdict_of(call, output=narrowed).status == "diverged"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_what_must_be_exact_is(name: str, dtype: str) -> None:
    row, norm = EXACT[name]
    x = torch.tensor([row, row]).to(DTYPES[dtype])
    if dtype == "fp16" and name in ("equal", "a NaN", "an infinity"):
        x = torch.tensor([row, row]).clamp(-(2.0**14), 2.0**14).to(DTYPES[dtype])
        x = x if name == "equal" else torch.tensor([row, row]).to(DTYPES[dtype])
    call = call_of(x, dim=1)
    (may,) = OPERATOR.expected(call).values()
    assert np.array_equal(call.outputs["output"], np.float32([norm, norm]), equal_nan=True)
    assert (may.radius == 0.0).all() and not may.unknown.any()
    assert np.array_equal(may.lo, may.hi, equal_nan=True)
    assert not outside(may, call.outputs["output"]).any()
    assert outside(may, call.outputs["output"] + np.float32(1.0)).all() or not math.isfinite(norm)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_squares_that_leave_fp32_are_allowed_for(dtype: str) -> None:
    small = torch.tensor([[2.0**-80, 2.0**-90], [2.0**-62, 2.0**-64]]).to(DTYPES[dtype])
    assert "diverged" not in verdict_of(call_of(small, dim=1)).status
    large = torch.tensor([[2.0**70, 1.0], [2.0**62, 1.0]]).to(DTYPES[dtype])
    call = call_of(large, dim=1)
    assert np.isinf(call.outputs["output"]).tolist() == [True, False]
    assert verdict_of(call).status == "ok"
    (may,) = OPERATOR.expected(call).values()
    assert may.unknown.tolist() == [True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_norm_that_leaves_something_out_is_seen(dtype: str, order: float) -> None:
    x = torch.ones(4, 9).to(DTYPES[dtype])
    x[:, -1] = 2.0
    wrong = torch.linalg.vector_norm(x[:, :-1], order, dim=1).float().numpy()
    verdict = verdict_of(call_of(x, order, dim=1), output=wrong)
    assert (verdict.status, verdict.role) == ("diverged", "vector_norm")
    title = {2.0: "2", 1.0: "1", math.inf: "inf"}[order]
    assert f"the {title}-norm over dim 1 of a {OPERATOR_DTYPE[dtype]}" in verdict.sentence()


OPERATOR_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_of_a_list_each_tensor_is_a_call(dtype: str, order: float) -> None:
    tensors = [torch.randn(n).to(DTYPES[dtype]) for n in (3, 0, 17) if n or order != math.inf]
    calls = calls_of(torch._foreach_norm, tensors, order)
    assert [call.tensors["input"].size for call in calls] == [len(t) for t in tensors]
    assert [call.index for call in calls] == list(range(len(tensors)))
    for call in calls:
        (may,) = OPERATOR.expected(call).values()
        assert not outside(may, call.outputs["output"]).any() and not may.unknown.any()


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_is_seen_and_changes_nothing(foreach: bool) -> None:
    """Clipping takes these calls wherever a watch is open; the players of trainings on one process
    clip nothing, and ``keep_norm`` of those on ranks runs where no operator is watched."""

    def clipped() -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 4.0)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
        return parameters

    calls = calls_of(clipped)
    assert [call.tensors["input"].size for call in calls] == [3, 5, 2]
    assert {verdict.status for call in calls for verdict in judge_call("eager", call)} == {"ok"}
    with OperatorWatch():
        watched = clipped()
    for one, other in zip(watched, clipped(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_its_script_is_the_call_alone(order: float, capsys: pytest.CaptureFixture[str]) -> None:
    call = call_of(torch.tensor([[1.0, 2.0, 4.5]]), order, dim=1)
    wrong = OperatorCall(**{**vars(call), "outputs": {"output": np.float32([9.0])}})
    (verdict,) = judge_call("eager", wrong)
    text = "\n".join(of_operator(wrong, verdict, "cpu").parts)
    with pytest.raises(SystemExit) as end:
        exec("import math, sys, torch\n" + text, {})
    assert end.value.code == 0, capsys.readouterr().out


def test_what_has_no_reference_is_no_call() -> None:
    with OperatorWatch() as watch:
        torch.linalg.vector_norm(torch.ones(3), 3)
        torch.linalg.vector_norm(torch.ones(3).double())
    assert not watch.operators and watch.unjudged == {"vector norms": "of order 3"}


def test_of_a_list_the_small_tensors_are_judged_and_the_large_ones_named() -> None:
    with OperatorWatch() as watch:
        torch._foreach_norm([torch.ones(1025, 1024), torch.ones(3)], 2)
    (call,) = operators_of(watch.operators)
    assert call.tensors["input"].shape == (3,)
    assert watch.unjudged == {"vector norms": "a tensor of more than 1048576 elements"}
