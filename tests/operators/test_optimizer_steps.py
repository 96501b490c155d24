"""Steps of optimizers: torch's are inside the bounds but for what is known, and others are seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.ledger.mitigations import CURES
from narrowfuzz.operators import BY_NAME
from narrowfuzz.play.literal import laid
from narrowfuzz.play.optimizer_step import stepped
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KNOWN = {"sgd_blocks_skipped": "blocks"}
SGD: tuple[dict[str, Any], ...] = (
    {},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.5, "dampening": 0.25, "maximize": True},
)
ADAM: tuple[dict[str, Any], ...] = ({}, {"weight_decay": 0.1, "betas": (0.5, 0.75)})
ADAGRAD: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.3},
    {"maximize": True, "eps": 2.0**-10, "initial_accumulator_value": 1.0},
)
HOW: tuple[dict[str, Any], ...] = ({}, {"foreach": True}, {"fused": True})
WAYS = [
    (kind, {"lr": 0.01, **options, **how})
    for kind, several in (("SGD", SGD), ("Adam", ADAM), ("AdamW", ADAM), ("Adagrad", ADAGRAD))
    for options in several
    for how in HOW
]


def values(dtype: str) -> Iterator[Any]:
    """Of a parameter and its gradients."""
    make = torch.Generator().manual_seed(0)
    for scale in (1.0, 2.0**-10, 2.0**8):
        yield [(torch.randn(37, generator=make) * s).to(DTYPES[dtype]) for s in (1.0, *[scale] * 3)]
    spread = torch.randn(37, generator=make) * 2.0 ** torch.randint(-20, 5, (37,), generator=make)
    yield [torch.randn(37, generator=make).to(DTYPES[dtype]), *[spread.to(DTYPES[dtype])] * 3]
    for size in (1, 8, 17):
        start, *grads = (torch.randn(size, generator=make).to(DTYPES[dtype]) for _ in range(4))
        yield [start, torch.zeros_like(start), *grads[1:]]
        yield [start, torch.full_like(start, 0.25), start * 2.0**-13, start * 2.0**-140]
    # a first moment, and its product with the step's size, that are subnormal in fp32
    small = [torch.randn(37, generator=make) * 2.0**by for by in (-120, -138, -138, -1000)]
    yield [x.to(DTYPES[dtype]) for x in small]
    huge = torch.tensor([2.0**60, 2.0**127, torch.inf, torch.nan, -(2.0**64), 1.0])
    yield [torch.ones(6).to(DTYPES[dtype]), *[huge.to(DTYPES[dtype])] * 3]


def calls_of(kind: str, options: Mapping[str, Any], start: Any, *grads: Any) -> Any:
    parameter = torch.nn.Parameter(laid(start, start.stride()))
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    watch = OperatorWatch()
    with watch:
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
    return operators_of(watch.operators)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("kind", "options"), WAYS, ids=lambda x: str(x))
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_steps_are_inside_the_bounds_but_for_what_is_known(
    kind: str, options: dict[str, Any], dtype: str
) -> None:
    judged = 0
    for start, *grads in values(dtype):
        calls = calls_of(kind, options, start, *grads)
        assert [call.settings["steps"] > 0 for call in calls] == [
            (kind != "SGD" and i > 0) or (bool(options.get("momentum")) and i > 0) for i in range(3)
        ]
        for call in calls:
            for verdict in judge_call("eager", call, None, KNOWN):
                judged += verdict.status == "ok"
                skips = kind == "SGD" and options.get("fused") and dtype != "fp32"
                assert verdict.status != "known" or skips
                assert verdict.status != "diverged", verdict.sentence()
    assert judged or (kind, dtype, options.get("fused")) == ("SGD", "fp16", True)


def step_of(kind: str, **options: Any) -> OperatorCall:
    """The second step of a parameter of 37 elements in bf16."""
    start, *grads = next(values("bf16"))
    return calls_of(kind, {"lr": 0.01, **options}, start, *grads)[1]  # type: ignore[no-any-return]


def statuses(call: OperatorCall) -> dict[str, str]:
    return {v.role.rpartition(".")[2]: v.status for v in judge_call("eager", call, None, KNOWN)}


@pytest.mark.parametrize(
    ("kind", "options", "result"),
    [
        ("SGD", {"momentum": 0.9}, "param"),
        ("SGD", {"momentum": 0.9}, "momentum_buffer"),
        ("Adam", {}, "param"),
        ("Adam", {"weight_decay": 0.1}, "exp_avg"),
        ("AdamW", {"foreach": True}, "exp_avg_sq"),
        ("Adagrad", {"foreach": True, "lr": 0.5}, "param"),
        ("Adagrad", {"fused": True, "weight_decay": 0.1}, "sum"),
    ],
)
def test_a_few_units_in_one_element_are_seen(
    kind: str, options: dict[str, Any], result: str
) -> None:
    call = step_of(kind, **options)
    assert set(statuses(call).values()) == {"ok"}
    got = call.outputs[result].copy()
    got[5] *= 1.0 + 2.0**-4
    moved = replace(call, outputs={**call.outputs, result: got})
    assert statuses(moved)[result] == "diverged"


def test_what_is_known_of_fused_sgd_explains_whole_registers_alone() -> None:
    call = step_of("SGD", fused=True)
    assert statuses(call) == {"param": "known"}
    for at in (3, 36):  # in a register, and behind the last
        wrong = call.outputs["param"].copy()
        wrong[at] += np.float32(1.0)
        assert statuses(replace(call, outputs={"param": wrong})) == {"param": "diverged"}


def test_a_script_steps_from_the_same_state() -> None:
    call = step_of("AdamW", weight_decay=0.1)
    state = {n: torch.from_numpy(call.tensors[n]).bfloat16() for n in ("exp_avg", "exp_avg_sq")}
    param, grad = (torch.from_numpy(call.tensors[n]).bfloat16() for n in ("param", "grad"))
    found = stepped("AdamW", call.settings["options"], call.settings["steps"], param, grad, **state)
    for name, t in zip(BY_NAME["adam_step"].results, found, strict=True):
        assert t is not None and np.array_equal(t.float().numpy(), call.outputs[name])


def test_a_script_of_adagrad_begins_with_the_sum_that_its_options_give() -> None:
    start, *grads = next(values("fp32"))
    options = {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.25}
    for call in calls_of("Adagrad", options, start, *grads):
        param, grad, total = (torch.from_numpy(call.tensors[n]) for n in ("param", "grad", "sum"))
        how, steps = call.settings["options"], call.settings["steps"]
        found = stepped("Adagrad", how, steps, param, grad, sum=total)
        for name, t in zip(BY_NAME["adagrad_step"].results, found, strict=True):
            assert t is not None and np.array_equal(t.numpy(), call.outputs[name])


def test_what_a_wrong_sum_makes_of_a_parameter_is_not_judged() -> None:
    start, *grads = next(values("fp32"))
    call = list(calls_of("Adagrad", {"lr": 0.1}, start, *grads))[-1]
    assert statuses(call) == {"param": "ok", "sum": "ok"}
    wrong = replace(call, outputs={**call.outputs, "sum": call.outputs["sum"] * np.float32(4.0)})
    assert statuses(wrong) == {"param": "inconclusive", "sum": "diverged"}


def test_a_sparse_gradient_is_no_call() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    table(torch.tensor([1, 3])).sum().backward()
    with OperatorWatch() as watch:
        optimizer.step()
    assert {call.operator for call in watch.operators} <= {"pow"}
    assert watch.unjudged == {"steps of optimizers": "a sparse gradient"}


@pytest.mark.parametrize(
    ("kind", "options"), [("Adam", {"amsgrad": True}), ("Adamax", {}), ("Adam", {"lr": "tensor"})]
)
def test_what_has_no_reference_is_no_call(kind: str, options: dict[str, Any]) -> None:
    if options.get("lr"):
        options = {"lr": torch.tensor(0.01)}
    start, *grads = next(values("fp32"))
    assert not calls_of(kind, options, start, *grads)


def test_a_watched_optimizer_keeps_what_it_kept() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    with OperatorWatch():
        optimizer.step()
    assert not optimizer.state


def test_nothing_is_watched_afterwards() -> None:
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks)
    step_of("SGD")
    assert len(optimizer._global_optimizer_pre_hooks) == before


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "options"),
    [
        (torch.float16, 2e-3, {"lr": 1e-3, "initial_accumulator_value": 1e-4}),
        (torch.float32, 2.0**-140, {"lr": 1e-3, "initial_accumulator_value": 0.01}),
        (torch.float16, 100.0, {"lr": 1000.0, "initial_accumulator_value": 1.0}),
    ],
)
def test_adagrads_rate_times_its_gradient_may_be_rounded_apart(
    dtype: torch.dtype, size: float, options: dict[str, float], foreach: bool
) -> None:
    """Where that is subnormal, or overflows."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
    parameter.grad = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    with OperatorWatch() as watch:
        torch.optim.Adagrad([parameter], foreach=foreach, **options).step()
    (call,) = operators_of(watch.operators)
    assert "diverged" not in {verdict.status for verdict in judge_call("eager", call)}


def with_gaps(t: torch.Tensor) -> torch.Tensor:
    return laid(t, (2,))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_parameter_with_gaps_is_stepped_as_others_are(kind: str, how: dict[str, Any]) -> None:
    """But by the fused kernels of a CPU, whose cure makes them right; and a script shows them."""
    start, *grads = next(values("fp32"))
    options = {"lr": 0.01, **how}
    with CURES["contiguous_fused_steps"]():
        cured = list(calls_of(kind, options, with_gaps(start), *grads))
    assert {status for call in cured for status in statuses(call).values()} <= {"ok"}
    found = list(calls_of(kind, options, with_gaps(start), *grads))
    for call, right in zip(found, cured, strict=True):
        assert call.strides["param"] == (2,)
        if how.get("fused"):
            assert statuses(call)["param"] == "diverged"
        else:
            assert np.array_equal(call.outputs["param"], right.outputs["param"])
        tensors = {n: laid(torch.from_numpy(x), call.strides[n]) for n, x in call.tensors.items()}
        again = stepped(kind, call.settings["options"], call.settings["steps"], **tensors)
        assert np.array_equal(np.asarray(again[0]), call.outputs["param"])
