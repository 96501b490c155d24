"""Choosing and sorting: torch's kernels are exact for every dtype, with ties and NaN; a wrong
value, a wrong or repeated place, and a stable sort that is none, are seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.play.derived import at_their_places
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def call_of(run: Callable[[], object]) -> OperatorCall:
    with OperatorWatch() as watch:
        run()
    (call,) = operators_of(watch.operators)
    return call


def statuses(call: OperatorCall) -> dict[str, str]:
    return {v.role.partition(".")[2]: v.status for v in judge_call("eager", call)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_kernels_are_exact(dtype: str) -> None:
    make = torch.Generator().manual_seed(3)
    for shape, dim in (((7,), 0), ((33, 5), -1), ((33, 5), 0), ((2, 8, 3), 1)):
        for ties in (False, True):
            x = torch.randn(shape, generator=make)
            x = (x.round() if ties else x).to(DTYPES[dtype])
            x.view(-1)[2] = math.nan
            for run in (
                lambda x=x, dim=dim: x.topk(2, dim),
                lambda x=x, dim=dim: x.topk(1, dim, largest=False),
                lambda x=x, dim=dim: x.sort(dim),
                lambda x=x, dim=dim: torch.sort(x, dim=dim, descending=True, stable=True),
            ):
                # of a single place none can be named twice
                found = statuses(call_of(run))
                assert set(found.values()) <= {"ok", "inconclusive"} and found["values"] == "ok"


def test_whole_numbers_are_sorted_as_experts_are() -> None:
    call = call_of(lambda: torch.tensor([2, 0, 1, 0, 2]).argsort(stable=True))
    assert call.outputs["indices"].tolist() == [1, 3, 2, 0, 4]
    assert statuses(call)["values"] == "ok"
    assert BY_NAME["sort"].title(call).startswith("torch.sort, the smallest first, along dim 0")


def wrong(call: OperatorCall, **outputs: np.ndarray) -> OperatorCall:
    """The call with other results, and what follows of them."""
    changed = {**call.outputs, **outputs}
    live = {name: torch.from_numpy(np.asarray(x)) for name, x in changed.items()}
    tensors = {name: torch.from_numpy(np.asarray(x)) for name, x in call.tensors.items()}
    derived = at_their_places(tensors, live, call.settings)
    return replace(call, outputs={**changed, **{n: t.numpy() for n, t in derived.items()}})


def test_wrong_choices_are_seen() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0]])
    call = call_of(lambda: x.topk(2))
    other = wrong(call, values=np.float32([[3, 2]]), indices=np.float32([[0, 3]]))
    assert statuses(other)["values"] == statuses(other)["found"] == "diverged"
    elsewhere = wrong(call, indices=np.float32([[0, 1]]))
    assert (statuses(elsewhere)["values"], statuses(elsewhere)["found"]) == ("ok", "diverged")
    twice = wrong(call, indices=np.float32([[0, 0]]))
    assert (statuses(twice)["found"], statuses(twice)["misplaced"]) == ("ok", "diverged")
    tied = wrong(call, indices=np.float32([[2, 0]]))
    assert "diverged" not in statuses(tied).values()


def test_a_stable_sort_keeps_the_order_of_what_is_equal() -> None:
    x = torch.tensor([1.0, 0.0, 1.0, 0.0])
    stable, free = (call_of(lambda s=s: torch.sort(x, stable=s)) for s in (True, False))
    swapped = np.float32([3, 1, 0, 2])
    assert statuses(wrong(stable, indices=swapped))["misplaced"] == "diverged"
    assert "diverged" not in statuses(wrong(free, indices=swapped)).values()


def test_what_is_not_judged_says_why() -> None:
    with OperatorWatch() as watch:
        torch.ones(2, 4).topk(2, sorted=False)
        torch.ones(()).sort()
    assert not watch.operators
    assert watch.unjudged["topk"] == "in no order"
