"""Steps of Muon: torch's are inside their bounds whatever the gradient is; wrong ones are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.operators.muon_step import LARGEST
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.play.derived import singular_values_and_alignment
from narrowfuzz.play.optimizer_step import stepped
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.triage.script.operator import of_operator

muon = pytest.importorskip("torch.optim._muon", reason="torch.optim.Muon came with torch 2.9")

KNOWN = {"muon_buffer_normalised": "an-entry"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"nesterov": False, "momentum": 0.5},
    {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.0},
)


def gradients(rows: int, columns: int) -> Iterator[torch.Tensor]:
    """Normal, of far magnitudes, of rank one and beside it little, almost constant, with rows of
    zeros, signs, and nothing."""
    make = torch.Generator().manual_seed(rows)
    normal = torch.randn(rows, columns, generator=make)
    yield normal
    yield normal * 2.0 ** torch.randint(-12, 1, (rows, columns), generator=make)
    yield normal[:, :1] @ normal[:1] + 0.05 * torch.randn(rows, columns, generator=make)
    yield 1.0 + 0.1 * normal
    yield normal * (torch.rand(rows, 1, generator=make) < 0.5)
    yield normal.sign()
    yield normal * 0.0


def calls_of(start: torch.Tensor, *grads: torch.Tensor, **options: Any) -> Any:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([parameter], **{"lr": 0.5, **options})
    with OperatorWatch() as watch:
        for grad in grads:
            parameter.grad = grad.to(parameter.dtype)
            optimizer.step()
    # the iteration takes a norm, which is a call of its own
    return [call for call in operators_of(watch.operators) if call.operator == "muon_step"]


def statuses(call: OperatorCall, known: Mapping[str, str] = {}) -> dict[str, str]:
    return {v.role.partition(".")[2]: v.status for v in judge_call("eager", call, None, known)}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 7), (33, 17), (8, 64), (65, 64)])
def test_torchs_steps_are_inside_the_bounds(
    rows: int, columns: int, options: dict[str, Any], dtype: str
) -> None:
    start = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.1
    start, judged = start.to(DTYPES[dtype]), 0
    for grad in gradients(rows, columns):
        for size in (1.0, 2.0**-12, 2.0**10):
            for call in calls_of(start, grad * size, -0.25 * grad.flip(1) * size, **options):
                found = statuses(call, KNOWN)
                assert "diverged" not in found.values()
                assert known_values(call).all()
                judged += found["singular_values"] == "ok"
    assert judged >= 24  # those of zeros say nothing


def test_without_nesterov_a_bf16_momentum_is_overwritten() -> None:
    """torch 2.13: the iteration divides in place what ``bfloat16()`` did not copy (pytorch#194664,
    which mends it)."""
    muon._zeropower_via_newtonschulz(given := torch.ones(2, 2).bfloat16(), (0, 0, 0), 0, 1e-7)
    overwrites = bool((given != 1.0).any())
    for dtype, wrong in (("fp32", False), ("bf16", overwrites)):
        call = step_of(dtype, nesterov=False)
        assert statuses(call)["momentum_buffer"] == ("diverged" if wrong else "ok")
        assert statuses(call)["singular_values"] == "ok"
        assert statuses(call, KNOWN)["momentum_buffer"] == ("known" if wrong else "ok")


def known_values(call: OperatorCall) -> Any:
    return ~BY_NAME["muon_step"].expected(call)["singular_values"].unknown


def step_of(dtype: str = "fp32", size: float = 1.0, **options: Any) -> OperatorCall:
    """The second step of a matrix."""
    first, second, *_ = gradients(33, 17)
    start = torch.linspace(-0.1, 0.1, 33 * 17).reshape(33, 17).to(DTYPES[dtype])
    return calls_of(start, first * size, second * size, **options)[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2.0**-8, 1.0, 2.0**8])
@pytest.mark.parametrize("normed", [False, True])
def test_without_its_iteration_it_is_seen_whatever_the_gradients_size(
    dtype: str, size: float, normed: bool
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8442: the update was that of SGD."""

    def plain(grad: torch.Tensor, *args: Any) -> torch.Tensor:
        return grad.bfloat16() / (grad.norm().bfloat16() if normed else 1.0)

    with attribute_replaced(muon, "_zeropower_via_newtonschulz", lambda run: plain):
        call = step_of(dtype, size)
    assert statuses(call)["singular_values"] == "diverged"
    assert statuses(call)["momentum_buffer"] == "ok"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda update: -update,
        lambda update: update.flip(0),
        lambda update: torch.linalg.qr(torch.randn(33, 17))[0] * update.norm() / 17**0.5,
    ],
    ids=["the other way", "rows exchanged", "another matrix"],
)
def test_an_update_of_another_direction_is_seen(wrong: Any) -> None:
    def turned(run: Any) -> Any:
        return lambda *args: wrong(run(*args).float()).bfloat16()

    with attribute_replaced(muon, "_zeropower_via_newtonschulz", turned):
        call = step_of()
    assert statuses(call)["alignment"] == "diverged"
    assert statuses(step_of())["alignment"] == "ok"


@pytest.mark.parametrize("result", ["param", "momentum_buffer"])
def test_a_wrong_element_is_seen(result: str) -> None:
    call = step_of("bf16")
    assert "diverged" not in statuses(call).values()
    got = call.outputs[result].copy()
    got[5, 3] += 0.5 * 1.5 * LARGEST * (33 / 17) ** 0.5 if result == "param" else got[5, 3] / 16
    assert statuses(replace(call, outputs={**call.outputs, result: got}))[result] == "diverged"


def test_what_is_not_finite_or_hidden_is_not_judged() -> None:
    start, grad = torch.ones(8, 8), torch.randn(8, 8)
    grad[2, 3] = torch.nan
    (call,) = calls_of(start, grad)
    assert np.isnan(call.outputs["singular_values"]).all() and not known_values(call).any()
    assert "diverged" not in statuses(call).values()
    (huge,) = calls_of(start, torch.full((8, 8), 2.0**100))
    assert not known_values(huge).any() and "diverged" not in statuses(huge).values()
    (hidden,) = calls_of(start.bfloat16() * 512, torch.randn(8, 8), lr=2.0**-6)
    assert {*statuses(hidden).values()} == {"ok", "inconclusive"}
    assert statuses(hidden)["singular_values"] == "inconclusive"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_script_takes_the_same_step(dtype: str) -> None:
    call = step_of(dtype)
    held = {n: torch.from_numpy(x).to(DTYPES[dtype]) for n, x in call.tensors.items()}
    found = stepped("Muon", call.settings["options"], call.settings["steps"], **held)
    results = dict(zip(BY_NAME["muon_step"].returned, found, strict=True))
    results |= singular_values_and_alignment(held, results, call.settings)
    for name, t in results.items():
        assert np.array_equal(t.float().numpy(), call.outputs[name])


@pytest.mark.parametrize("result", ["param", "momentum_buffer", "singular_values", "alignment"])
def test_its_script_makes_the_result_that_is_wrong(
    result: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = step_of()
    got = call.outputs[result] * np.float32(8.0)
    wrong = replace(call, outputs={**call.outputs, result: got})
    (verdict,) = (v for v in judge_call("eager", wrong) if v.status == "diverged")
    text = "\n".join(of_operator(wrong, verdict, "cpu").parts)
    with pytest.raises(SystemExit) as end:
        exec("import math, sys, torch\n" + text, {})
    assert end.value.code == 0, capsys.readouterr().out
    assert f"{result} of muon_step" in capsys.readouterr().out


@pytest.mark.parametrize("how", [{"ns_steps": 3}, {"ns_coefficients": (2.0, -1.5, 0.5)}])
def test_another_iteration_has_no_reference(how: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    optimizer = torch.optim.Muon([parameter], **how)
    with OperatorWatch() as watch:
        optimizer.step()
    (why,) = watch.unjudged.values()
    assert "muon_step" not in {call.operator for call in watch.operators}
    assert why == f"Muon with other {next(iter(how))} than by default"


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 2.0**100, 1.0])
@pytest.mark.parametrize("size", [1.0, 2.0**-45])
def test_what_divides_a_whole_buffer_leaves_it_open(bad: float, size: float) -> None:
    grad = torch.eye(4) * size
    grad[0, 0] *= bad
    for call in calls_of(torch.zeros(4, 4).bfloat16(), grad, grad, nesterov=False, momentum=0.5):
        assert "diverged" not in statuses(call, KNOWN).values()
