"""What GradScaler unscales: torch's kernel is inside the bound and finds what is not finite; what
is overwritten is seen as it was before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import EagerWatch, OperatorWatch, operators_of
from narrowfuzz.operators.unscale import OPERATOR
from narrowfuzz.play.unscaled import unscaled
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.triage.script.operator import of_operator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Values that bite: equal powers of two, zeros, subnormal, huge and not finite ones.
ROWS: dict[str, list[float]] = {
    "equal": [2.0**-3] * 9,
    "zeros": [0.0, -0.0],
    "subnormal": [2.0**-130, 2.0**-24, -(2.0**-149), 1.0],
    "huge": [2.0**127, -(2.0**15), 1.5],
    "a NaN": [1.0, math.nan],
    "an infinity": [-math.inf, 1.0],
}


def calls_of(tensors: list[torch.Tensor], inverse: float, found: float = 0.0) -> Any:
    given = torch.tensor([found]), torch.tensor([inverse])
    with OperatorWatch() as watch:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, *given)
    return operators_of(watch.operators)


def statuses(call: OperatorCall, **outputs: Any) -> dict[str, str]:
    call = OperatorCall(**{**vars(call), "outputs": {**call.outputs, **outputs}})
    return {v.role.rpartition(".")[2]: v.status for v in judge_call("eager", call)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [1.0, 2.0**-16, 2.0**20, 1 / 3000, 0.0])
def test_torchs_kernel_is_inside_the_bound(dtype: str, inverse: float) -> None:
    make = torch.Generator().manual_seed(3)
    for n in (1, 7, 8, 33):
        spread = torch.randn(n, generator=make) * 2.0 ** torch.randint(
            -30, 20, (n,), generator=make
        )
        (call,) = calls_of([spread.to(DTYPES[dtype])], inverse)
        assert "diverged" not in statuses(call).values()
    for row in ROWS.values():
        given = torch.tensor(row).to(DTYPES[dtype])
        (call,) = calls_of([given.clone()], inverse)
        assert np.array_equal(call.tensors["grad"], given.float().numpy(), equal_nan=True)
        assert call.outputs["found_inf"].tolist() == [float(not given.isfinite().all())]
        assert "diverged" not in statuses(call).values()


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_a_power_of_two_it_is_exact_and_by_others_rounded_once(dtype: str) -> None:
    x = torch.tensor([1.0, 1.5, -3.0, 100.0]).to(DTYPES[dtype])
    (call,) = calls_of([x.clone()], 2.0**-4)
    may = OPERATOR.expected(call)["grad"]
    assert (may.radius == 0.0).all() and np.array_equal(may.lo, may.hi)
    assert statuses(call)["grad"] == "ok"
    (call,) = calls_of([x.clone()], 1 / 3)
    unit = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}[dtype]
    assert statuses(call)["grad"] == "ok"
    moved = call.outputs["grad"] * np.float32(1.0 + 2.0 * unit)
    assert statuses(call, grad=moved)["grad"] == "diverged"
    assert statuses(call, grad=call.tensors["grad"])["grad"] == "diverged"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_of_a_list_each_gradient_is_a_call(dtype: str, value: float) -> None:
    bad = torch.ones(17)
    bad[16] = value
    every = [torch.ones(3).to(DTYPES[dtype]), bad.to(DTYPES[dtype]), torch.ones(0)[:0]]
    calls = calls_of([t.to(DTYPES[dtype]) for t in every], 0.5)
    assert [call.settings["others_finite"] for call in calls] == [False, True, False]
    assert {status for call in calls for status in statuses(call).values()} <= {
        "ok",
        "inconclusive",
    }
    unfound = np.zeros(1, np.float32)
    assert statuses(calls[1], found_inf=unfound)["found_inf"] == "diverged"
    assert statuses(calls[0], found_inf=unfound)["found_inf"] == "inconclusive"


def test_what_was_found_before_is_not_forgotten() -> None:
    (call,) = calls_of([torch.ones(3)], 0.5, found=1.0)
    assert call.tensors["found_inf"].tolist() == call.outputs["found_inf"].tolist() == [1.0]
    assert statuses(call)["found_inf"] == "ok"
    assert statuses(call, found_inf=np.zeros(1, np.float32))["found_inf"] == "diverged"
    (call,) = calls_of([torch.ones(3)], 0.5)
    assert statuses(call, found_inf=np.ones(1, np.float32))["found_inf"] == "diverged"


def trained(**how: Any) -> torch.Tensor:
    """A parameter after three steps with a scaler, of which the second meets an infinity."""
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([parameter], lr=0.5, **how)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, math.inf, 2.0):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return parameter.detach()


def test_a_training_with_a_scaler_is_seen_and_goes_as_without_a_watch() -> None:
    with OperatorWatch() as watch:
        watched = trained()
    assert torch.equal(watched, trained())
    every = operators_of(watch.operators)
    calls = [call for call in every if call.operator == "unscale"]
    assert [call.outputs["found_inf"].tolist() for call in calls] == [0.0, 1.0, 0.0]
    assert len([call for call in every if call.operator == "sgd_step"]) == 2
    assert "diverged" not in {status for call in every for status in statuses(call).values()}


def test_a_fused_step_that_unscales_by_itself_is_no_call() -> None:
    with OperatorWatch() as watch:
        trained(fused=True)
    assert "sgd_step" not in {call.operator for call in operators_of(watch.operators)}
    assert "a GradScaler" in watch.unjudged["steps of optimizers"]


def test_an_argument_is_copied_before_its_kernel_overwrites_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[torch.Tensor] = []
    monkeypatch.setattr("narrowfuzz.arms.operators._copies", lambda t: copied.append(t) or t)
    with OperatorWatch():
        torch.ones(3).add_(1.0).sum()
        assert not copied
        torch._amp_foreach_non_finite_check_and_unscale_(
            [torch.ones(3)], torch.zeros(1), torch.ones(1)
        )
    assert len(copied) == 2


@pytest.mark.parametrize("result", ["grad", "found_inf"])
def test_its_script_is_the_call_alone(result: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([[1.0, 2.0, math.inf]])
    (call,) = calls_of([x], 0.5)
    outputs = {**call.outputs, result: np.full(call.outputs[result].shape, np.float32(0.25))}
    outputs["grad"][0, 2] = np.inf
    wrong = OperatorCall(**{**vars(call), "outputs": outputs})
    (verdict,) = (v for v in judge_call("eager", wrong) if v.status == "diverged")
    text = "\n".join(of_operator(wrong, verdict, "cpu").parts)
    with pytest.raises(SystemExit) as end:
        exec("import base64, io, math, sys, torch\n" + text, {})
    assert end.value.code == 0, capsys.readouterr().out


def test_a_script_unscales_a_gradient_that_it_is_given() -> None:
    grad, found = unscaled(torch.ones(3), torch.zeros(1), torch.tensor([0.25]))
    assert grad.tolist() == [0.25] * 3 and found.tolist() == [0.0]


def test_the_update_of_a_scale_is_exact_and_needs_no_reference() -> None:
    scale, steps = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    with EagerWatch() as watch:
        torch._amp_update_scale_(scale, steps, torch.tensor(1.0), 2.0, 0.5, 2000)
    assert scale.item() == 2.0**15 and not watch.unjudged


def test_what_is_too_large_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowfuzz.operators.unscale.LARGEST_GRADIENT", 8)
    with OperatorWatch() as watch:
        torch._amp_foreach_non_finite_check_and_unscale_(
            [torch.ones(9)], torch.zeros(1), torch.ones(1)
        )
    assert not watch.operators
    assert watch.unjudged == {OPERATOR.words: "a gradient of more than 8 elements"}
