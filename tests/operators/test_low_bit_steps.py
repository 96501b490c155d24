"""Steps of torchao's low-bit AdamW: inside their bounds but for what is known, which explains
nothing else; wrong ones are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.play.optimizer_step import trained
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

optim = pytest.importorskip("torchao.optim")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
KNOWN = {"low_bit_second_moment_lost": "moment-lost"}
RATE = {"lr": 2.0**-8}
#: Gradients of three steps, and what every second element of all but the first is instead.
SHAPE = (32, 128)


def gradients(size: float, rest: float | None = None) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    every = [torch.randn(*SHAPE, generator=make) * size for _ in range(3)]
    if rest is not None:
        every[0][:, 1::2] *= 1e-4
        for grad in every[1:]:
            grad[:, 1::2] = rest
    return every


def calls_of(
    kind: str,
    dtype: str,
    grads: list[torch.Tensor],
    start: torch.Tensor | None = None,
    **how: Any,
) -> tuple[OperatorCall, ...]:
    start = torch.linspace(-1, 1, 4096).reshape(SHAPE) if start is None else start
    parameter = torch.nn.Parameter(start.to(DTYPES[dtype]))
    optimizer = getattr(optim, kind)([parameter], **RATE, **how)
    with OperatorWatch() as watch, torch.compiler.set_stance("force_eager"):
        for grad in grads:
            parameter.grad = grad.to(parameter.dtype)
            optimizer.step()
    # its corrections are powers of beta
    return operators_of(call for call in watch.operators if call.operator != "pow")


def statuses(call: OperatorCall, known: dict[str, str] = KNOWN) -> dict[str, str]:
    return {v.role.partition(".")[2]: v.status for v in judge_call("eager", call, None, known)}


RIGHT = {"param": "ok", "bounded_param": "ok"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_its_steps_are_inside_the_bounds(kind: str, dtype: str) -> None:
    for size in (1.0, 1e-3):
        calls = calls_of(kind, dtype, gradients(size))
        assert [call.settings["steps"] for call in calls] == [1, 2, 3]
        assert [statuses(call) for call in calls] == [RIGHT] * 3


def test_a_subnormal_moment_times_the_rate_is_rounded_before_it_is_divided() -> None:
    """lr * m is 4.3e-43, of which one of 306 units is 0.3 %; epsilon makes a number of it."""
    gradient = torch.full(SHAPE, -1.0995e-40)
    call = calls_of("AdamW4bit", "fp32", [gradient], start=torch.zeros(SHAPE))[0]
    assert statuses(call)["param"] == "ok"
    doubled = {name: 2.0 * result for name, result in call.outputs.items()}
    assert statuses(replace(call, outputs=doubled))["param"] == "diverged"


@pytest.mark.parametrize("kind", KINDS)
def test_by_chance_it_rounds_to_either_neighbour(kind: str) -> None:
    rounds = {"bf16_stochastic_round": True}
    calls = calls_of(kind, "bf16", gradients(1.0), **rounds)
    assert [statuses(call) for call in calls] == [RIGHT] * 3
    nearest = {**calls[0].settings["options"], "bf16_stochastic_round": False}
    plain = [replace(c, settings={**c.settings, "options": nearest}) for c in calls]
    assert "diverged" in {statuses(call)["param"] for call in plain}
    far = calls[0].outputs["param"] * np.float32(1.0 + 2.0**-5)
    assert (
        statuses(replace(calls[0], outputs={"param": far, "bounded_param": far}))["param"]
        == "diverged"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [True, False])
def test_what_is_nan_stays_nan(kind: str, rounds: bool) -> None:
    grads = gradients(1.0)
    grads[0][3, 5] = torch.nan
    call = calls_of(kind, "bf16", grads, bf16_stochastic_round=rounds)[0]
    assert np.isnan(call.outputs["param"]).sum() == 1
    assert statuses(call) == RIGHT
    zeroed = np.nan_to_num(call.outputs["param"])  # as rounding a NaN's bits up carries it to -0
    assert statuses(replace(call, outputs={**call.outputs, "param": zeroed}))["param"] == "diverged"


def test_on_a_gpu_stochastic_rounding_is_known_to_lose_nan() -> None:
    """As an H200 answered each NaN that its arithmetic makes: with -0."""
    known = {"stochastic_rounding_loses_nan": "nan-lost"}
    grads = gradients(1.0)
    grads[0][3, 5] = torch.nan
    call = calls_of("AdamW8bit", "bf16", grads, bf16_stochastic_round=True)[0]
    lost = np.where(np.isnan(call.outputs["param"]), np.float32(-0.0), call.outputs["param"])
    answered = {**call.outputs, "param": lost}
    on_gpu = replace(call, outputs=answered, device="cuda")
    assert statuses(on_gpu, known)["param"] == "known"
    assert statuses(replace(call, outputs=answered), known)["param"] == "diverged", "no CPU's NaN"
    other = np.where(np.isnan(call.outputs["param"]), np.float32(1.0), call.outputs["param"])
    neighbour = replace(on_gpu, outputs={**call.outputs, "param": other})
    assert statuses(neighbour, known)["param"] == "diverged"


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_moment_that_is_lost_is_known(kind: str) -> None:
    first, second, _ = calls_of(kind, "fp32", gradients(1.0, rest=0.0))
    lost = kind != "AdamW4bit"  # which has no code of 0 for it
    assert statuses(first) == RIGHT
    assert statuses(second)["bounded_param"] == ("known" if lost else "ok")
    assert statuses(second, {})["bounded_param"] == ("diverged" if lost else "ok")
    if not lost:
        return
    further = second.outputs["param"].copy()
    further[0, 1] += 0.5  # of the same element: farther than dividing by epsilon takes it
    both = {"param": further, "bounded_param": further}
    neighbour = replace(second, outputs=both)
    assert statuses(neighbour) == {"param": "diverged", "bounded_param": "diverged"}
    jumps = second.outputs["bounded_param"].copy()
    jumps[0, 0] += 1.0  # of one whose second moment is not lost
    neighbour = replace(second, outputs={**second.outputs, "bounded_param": jumps})
    assert statuses(neighbour)["bounded_param"] == "diverged"


def test_without_its_correction_a_first_step_is_a_tenth() -> None:
    call = calls_of("AdamW8bit", "fp32", gradients(1.0))[0]
    before, after = call.tensors["param"], call.outputs["param"]
    uncorrected = before + (after - before) * np.float32(0.1 / np.sqrt(0.001))
    bad = replace(call, outputs={"param": uncorrected, "bounded_param": uncorrected})
    assert statuses(bad)["param"] == "diverged"


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_takes_the_same_steps(kind: str) -> None:
    call = calls_of(kind, "bf16", gradients(1.0, rest=0.0))[-1]
    start, grads = (torch.from_numpy(call.tensors[n]).bfloat16() for n in ("start", "grads"))
    (result,) = trained(kind, call.settings["options"], start, grads)
    assert np.array_equal(result.float().numpy(), call.outputs["param"])
    assert np.array_equal(call.outputs["bounded_param"], call.outputs["param"])


@pytest.mark.parametrize("why", ["begun", "amsgrad"])
def test_what_has_no_reference_is_no_call(why: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    options: dict[str, Any] = {
        "begun": {},
        "amsgrad": {"amsgrad": True},
    }[why]
    optimizer = optim.AdamW8bit([parameter], **RATE, **options)
    with torch.compiler.set_stance("force_eager"):
        if why == "begun":  # its first step was not seen
            parameter.grad = torch.ones(8)
            optimizer.step()
        parameter.grad = torch.ones(8)
        with OperatorWatch() as watch:
            optimizer.step()
    assert {call.operator for call in watch.operators} <= {"pow"}
