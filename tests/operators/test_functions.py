"""Functions that torch composes of kernels: torch's are inside their bounds, with the gradients
that each call alone gives; wrong ones are seen; what is known of them explains nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import EagerWatch, operators_of
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.operators import BY_NAME
from narrowfuzz.plants.registry import builtin_plants
from narrowfuzz.play.function_call import called
from narrowfuzz.play.running import Running
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.operators import check_operators, judge_call
from narrowfuzz.trace.trace import OperatorCall, Trace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KNOWN = {
    "smoothed_sums_overflow": "overflow",
    "linear_cross_entropy_divides_by_none": "nothing-counts",
}
#: Rows and features.
SIZES = ((1, 1), (3, 2), (33, 65), (7, 300))


def seen(operator: str, run: Callable[[], torch.Tensor], grad: float = 0.75) -> OperatorCall:
    """The one call of it in a forward and a backward of a constant gradient."""
    with EagerWatch() as watch:
        y = run()
        y.backward(torch.full_like(y, grad))
    (call,) = (c for c in operators_of(watch.operators) if c.operator == operator)
    return call


def drawn(seed: int, dtype: str, *shape: int, size: float = 1.0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=make) * size).to(DTYPES[dtype]).requires_grad_()


def targets(seed: int, rows: int, classes: int, ignored: float = 0.3) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, (rows,), generator=make)
    return torch.where(torch.rand(rows, generator=make) < ignored, -100, target)


def rms(dtype: str, rows: int, features: int, size: float = 1.0) -> OperatorCall:
    x = drawn(rows, dtype, rows, features, size=size)
    w = drawn(features, dtype, features)
    return seen("rms_norm", lambda: F.rms_norm(x, (features,), w, 1e-5))


def smoothed(dtype: str, rows: int, classes: int, reduction: str = "mean") -> OperatorCall:
    x, target = drawn(rows, dtype, rows, classes), targets(rows, rows, classes)
    how: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    return seen("smoothed_cross_entropy", lambda: F.cross_entropy(x, target, **how))


def chunked(dtype: str, rows: int, classes: int, ignored: float = 0.3, **how: Any) -> OperatorCall:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no linear_cross_entropy in chunks")
    x, w = drawn(rows, dtype, rows, 16), drawn(classes, dtype, classes, 16, size=0.3)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16, chunking_method=None)
    target = targets(rows, rows, classes, ignored)
    return seen(
        "linear_cross_entropy",
        lambda: F.linear_cross_entropy(x, w, target, options=options, **how),
    )


def statuses(call: OperatorCall) -> dict[str, str]:
    return {v.role.partition(".")[2]: v.status for v in judge_call("eager", call, None, KNOWN)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_rms_norms_are_inside_their_bounds(dtype: str, size: float) -> None:
    for rows, features in SIZES:
        found = statuses(rms(dtype, rows, features, size))
        assert set(found) == {"output", "grad_input", "grad_weight"}
        assert set(found.values()) <= {"ok", "inconclusive"}, (rows, features, found)
        assert found["output"] == "ok"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_are_inside_their_bounds(dtype: str, reduction: str) -> None:
    for make in (smoothed, chunked):
        for rows, classes in SIZES[1:]:
            found = statuses(make(dtype, rows, classes, reduction=reduction))
            assert found["output"] == found["grad_input"] == "ok", (make, rows, classes)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_losses_of_masked_classes_have_gradients_that_are_judged(dtype: str) -> None:
    for masked in (-1e12, torch.finfo(DTYPES[dtype]).min):  # the sum of the latter overflows
        x = drawn(4, dtype, 6, 20).detach()
        x[:, ::3] = masked
        x, target = x.requires_grad_(), torch.full((6,), 1)

        def loss(x: torch.Tensor = x, target: torch.Tensor = target) -> torch.Tensor:
            return F.cross_entropy(x, target, label_smoothing=0.1)

        call = seen("smoothed_cross_entropy", loss)
        found = statuses(call)
        assert found["grad_input"] == "ok"
        assert found["output"] == ("ok" if masked == -1e12 else "inconclusive")
        wrong = call.outputs["grad_input"] * np.float32(1.1)
        bad = replace(call, outputs={**call.outputs, "grad_input": wrong})
        assert statuses(bad)["grad_input"] == "diverged"


@pytest.mark.parametrize(
    "call",
    [rms("fp32", 33, 65), smoothed("bf16", 33, 65), chunked("fp32", 33, 65)],
    ids=lambda call: str(call.operator),
)
def test_a_wrong_element_of_any_result_is_seen(call: OperatorCall) -> None:
    expected = BY_NAME[call.operator].expected(call)
    for name, right in expected.items():
        wrong = call.outputs[name].copy()
        at = np.unravel_index(np.argmax(np.where(right.unknown, 0, abs(wrong))), wrong.shape)
        wrong[at] = float(right.hi[at]) + 2.0 * max(float(right.hi[at] - right.lo[at]), 1e-5)
        bad = replace(call, outputs={**call.outputs, name: wrong})
        assert statuses(bad)[name] == "diverged"


def test_fp16_sums_of_smoothed_losses_overflow_and_nothing_else_is_known_there() -> None:
    call = smoothed("fp16", 64, 1000)
    assert statuses(call) == {"output": "known", "grad_input": "ok"}
    nan = replace(call, outputs={**call.outputs, "output": np.float32(np.nan).reshape(())})
    assert statuses(nan)["output"] == "diverged"
    small = smoothed("fp16", 33, 65)  # whose sums fp16 holds
    inf = replace(small, outputs={**small.outputs, "output": np.float32(np.inf).reshape(())})
    assert statuses(inf)["output"] == "diverged"


def test_where_no_row_counts_gradients_of_nan_are_known_and_others_are_not() -> None:
    call = chunked("fp32", 8, 32, ignored=1.1)
    known = {"output": "inconclusive", "grad_input": "known", "grad_weight": "known"}
    assert statuses(call) | {"output": "inconclusive"} == known
    one = np.ones_like(call.outputs["grad_weight"])
    assert statuses(replace(call, outputs={**call.outputs, "grad_weight": one}))["grad_weight"] == (
        "diverged"
    )
    counted = chunked("fp32", 8, 32)
    lost = np.full_like(counted.outputs["grad_weight"], np.nan)
    neighbour = replace(counted, outputs={**counted.outputs, "grad_weight": lost})
    assert statuses(neighbour)["grad_weight"] == "diverged"


def test_a_nan_in_a_row_that_is_ignored_is_known_and_one_elsewhere_is_not() -> None:
    target, call = targets(40, 40, 7), chunked("fp32", 40, 7)
    nan = np.float32(np.nan).reshape(())
    padding = call.tensors["input"].copy()
    padding[np.flatnonzero(target.numpy() == -100)[0]] = np.nan
    lost = replace(
        call,
        tensors={**call.tensors, "input": padding},
        outputs={**call.outputs, "output": nan},
    )
    assert statuses(lost)["output"] == "known"
    finite = replace(call, outputs={**call.outputs, "output": nan})
    assert statuses(finite)["output"] == "diverged"


@pytest.mark.parametrize(
    "make",
    [lambda: rms("bf16", 5, 7), lambda: smoothed("fp32", 5, 7), lambda: chunked("fp32", 40, 7)],
    ids=["rms_norm", "cross_entropy", "linear_cross_entropy"],
)
def test_a_script_calls_it_alike(make: Callable[[], OperatorCall]) -> None:
    call = make()
    operator = BY_NAME[call.operator]
    tensors = {
        name: torch.from_numpy(x).to(DTYPES.get(call.dtypes[name], torch.float32))
        for name, x in call.tensors.items()
    }
    given = dict.fromkeys(operator.optional) | tensors
    settings = {
        name: value if str(value).startswith("torch.") else repr(value)
        for name, value in call.settings.items()
    }
    names = {**given, "torch": torch, "called": called}
    results = eval(operator.expression.format(**settings), names)
    for name, result in zip(operator.results, results, strict=True):
        assert np.array_equal(result.float().numpy(), call.outputs[name]), name


def test_each_call_has_the_gradients_that_it_gave_itself() -> None:
    x, w = drawn(0, "fp32", 4, 8), drawn(1, "fp32", 8)

    def twice() -> torch.Tensor:
        y: torch.Tensor = F.rms_norm(F.rms_norm(x, (8,), w, 1e-5), (8,), w, 1e-5).sum()
        return y

    plain = twice()
    plain.backward(retain_graph=True)
    expected = w.grad
    w.grad = None
    with EagerWatch() as watch:
        y = twice()
        y.backward(retain_graph=True)
        assert expected is not None
        assert w.grad is not None
        assert torch.equal(w.grad, expected), "to watch changes nothing"
        y.backward()  # what a second walk gives is the first's once more
    first, second = (c for c in operators_of(watch.operators) if c.operator == "rms_norm")
    parts = first.outputs["grad_weight"] + second.outputs["grad_weight"]
    assert np.allclose(parts, expected.numpy(), rtol=1e-5)
    assert not np.allclose(first.outputs["grad_weight"], expected.numpy(), rtol=1e-5)
    for call in (first, second):
        assert set(statuses(call).values()) <= {"ok", "inconclusive"}


def test_to_watch_leaves_the_order_of_sums_as_it_is() -> None:
    """The gradient of what a norm is given is added up of three parts and another's."""
    x, w = drawn(0, "bf16", 64, 32), drawn(1, "bf16", 32)
    grads = []
    for watched in (False, True):
        with EagerWatch() if watched else nullcontext():
            y = x + F.rms_norm(x, (32,), w, 1e-5) * F.silu(x)
            y.backward(torch.ones_like(y))
        assert x.grad is not None
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(*grads)


def test_without_gradients_the_output_alone_is_judged() -> None:
    x = drawn(0, "bf16", 4, 8)
    with torch.no_grad(), EagerWatch() as watch:
        F.rms_norm(x, (8,), None, 1e-5)
    (call,) = (c for c in operators_of(watch.operators) if c.operator == "rms_norm")
    assert statuses(call) == {"output": "ok"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_an_epsilon_it_is_that_of_the_dtype_or_of_fp32(dtype: str) -> None:
    """Of rows whose mean square is below both, and of others; twice either is neither."""
    for scale in (2.0**-14, 1.0):
        x = (drawn(0, "fp32", 4, 8) * scale).to(DTYPES[dtype]).requires_grad_()
        with EagerWatch() as watch:
            y = F.rms_norm(x, (8,))
            y.backward(torch.ones_like(y))
        (call,) = (c for c in operators_of(watch.operators) if c.operator == "rms_norm")
        assert statuses(call) == {"output": "ok", "grad_input": "ok"}
        if scale < 1.0:
            wrong = call.outputs["output"] * np.float32(1.5)
            bad = replace(call, outputs={**call.outputs, "output": wrong})
            assert statuses(bad)["output"] == "diverged"


def test_nothing_is_watched_afterwards_and_what_has_no_reference_is_no_call() -> None:
    x = drawn(0, "fp32", 4, 8)
    with EagerWatch() as watch:
        F.cross_entropy(x, targets(0, 4, 8))
        F.cross_entropy(x, targets(0, 4, 8), torch.ones(8), label_smoothing=0.1)
    F.rms_norm(x, (8,), None, 1e-5)
    functions = {o.name for o in BY_NAME.values() if o.functions}
    assert not functions & {c.operator for c in operators_of(watch.operators)}


@pytest.mark.parametrize(
    ("plant", "make", "results"),
    [
        ("rms-norm-epsilon-outside-root", lambda: rms("fp32", 9, 8, 1e-3), {"output"}),
        ("rms-norm-mean-of-padding", lambda: rms("bf16", 9, 9), {"output", "grad_input"}),
        ("rms-norm-factor-constant-in-backward", lambda: rms("fp32", 9, 8), {"grad_input"}),
        ("smoothing-spread-over-others", lambda: smoothed("fp32", 9, 8), {"output"}),
        ("smoothing-counts-ignored-rows", lambda: smoothed("fp32", 9, 8), {"output"}),
        ("chunked-loss-drops-last-chunk", lambda: chunked("fp32", 17, 8, 0.0), {"output"}),
    ],
)
def test_wrong_compositions_are_seen(
    plant: str, make: Callable[[], OperatorCall], results: set[str]
) -> None:
    with builtin_plants()[plant].plant():
        found = statuses(make())
    assert {name for name, status in found.items() if status == "diverged"} >= results
    assert "diverged" not in statuses(make()).values()


def test_kernels_in_place_and_tensors_without_numbers_are_not_judged() -> None:
    running = Running()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    running.follow(model)
    with EagerWatch(running) as watch:
        watch.linears = ["0"]
        y = model(torch.randn(3, 4)).detach()
        F.silu(y, inplace=True)
        torch.zeros(3, 4)[torch.tensor([0, 1, 1])] += y
        torch.logsumexp(y.sum(), 0)
        torch.tanh(torch.empty(5, device="meta"))
        2.0 ** y.abs()
        torch.sin(y.to_sparse())
    assert {call.operator for call in watch.operators} <= {"sum"}
    in_place = "in place, or into a tensor that is given"
    assert watch.unjudged["silu"] == in_place
    assert watch.unjudged["pow"] == "in a form that has no reference"
    of_scalar = "of a tensor without dimensions, of nothing, or over several dimensions"
    assert watch.unjudged["logsumexp"] == of_scalar


def test_what_nobody_judges_is_named_with_the_reason() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    running = Running()
    running.follow(model)
    x, y = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
    with EagerWatch(running) as watch:
        watch.linears = ["0"]
        h = F.softplus(model(x)).relu() @ torch.eye(4)
        h = F.rms_norm(h, (4,), eps=1e-5) + F.embedding(y, torch.ones(3, 4)).view(3, 4)
        F.cross_entropy(h, y, label_smoothing=0.1, weight=torch.ones(4)).backward()
    smoothed = "smoothed labels with class weights, or targets that are probabilities"
    assert watch.unjudged == {
        "softplus": "no reference",
        "cross entropies with smoothed labels": smoothed,
    }
    trace = Trace("eager", operators=operators_of(watch.operators), unjudged=watch.unjudged)
    case = Case(spec=Spec(recipe="torch.fp32", model="linear", dtype="fp32"), data=DataSpec())
    verdicts = list(check_operators(Evidence(case, {"eager": trace})))
    assert [v.role for v in verdicts if v.status == "not_applicable"] == list(watch.unjudged)
    assert any(v.status == "ok" and v.role == "rms_norm.output" for v in verdicts)
