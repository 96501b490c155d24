"""Sums over rows: torch's kernels are inside the bound, exact sums are exact, wrong ones seen."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.operators.sum import OPERATOR, exact_sums, shares, summed
from narrowfuzz.play.kernels import on_threads
from narrowfuzz.rules.expected import outside
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Shape, dimensions, and whether they are kept.
SHAPES: list[tuple[tuple[int, ...], Any, bool]] = [
    ((33, 7), 0, True), ((4096, 3), 0, False), ((5, 300), 1, False), ((4, 9, 17), (0, 1), False),
    ((3, 50, 2, 40), (1, 3), True), ((20,), 0, False), ((6, 5), (0, 1), False), ((0, 4), 0, True),
    ((2, 3, 5), -1, True),
]  # fmt: skip
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "expanded": lambda x: x[:1].expand(x.shape),
}


def call_of(x: torch.Tensor, *args: Any, **kwargs: Any) -> OperatorCall:
    watch = OperatorWatch()
    with watch:
        torch.sum(x, *args, **kwargs)
    (call,) = operators_of(watch.operators)
    return call


def verdict_of(call: OperatorCall, **outputs: Any) -> Any:
    call = OperatorCall(**{**vars(call), "outputs": {**call.outputs, **outputs}})
    (verdict,) = judge_call("eager", call)
    return verdict


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bound_holds_for_torch_whatever_the_shape_and_layout(dtype: str, layout: str) -> None:
    make = torch.Generator().manual_seed(7)
    for (shape, dim, keeps), spread in itertools.product(SHAPES, (1.0, 1e4)):
        drawn = torch.randn(shape, generator=make)
        x = LAYOUTS[layout]((drawn * spread ** torch.rand(shape, generator=make)).to(DTYPES[dtype]))
        call = call_of(x, dim, keeps)
        (may,) = OPERATOR.expected(call).values()
        assert may.lo.shape == call.outputs["output"].shape
        assert not outside(may, call.outputs["output"]).any(), (shape, dim)
        assert not may.unknown.any()


@pytest.mark.parametrize("asked", DTYPES)
def test_a_sum_in_another_dtype_casts_before_it_adds(asked: str) -> None:
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(1))
    for given in DTYPES.values():
        call = call_of(x.to(given), 0, dtype=DTYPES[asked])
        assert call.dtypes["output"] == asked and verdict_of(call).status == "ok"


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_powers_of_two_add_up_exactly(dtype: str) -> None:
    x = torch.full((4096, 2), 0.25, dtype=DTYPES[dtype])
    call = call_of(x, 0)
    (may,) = OPERATOR.expected(call).values()
    assert (may.lo == 1024.0).all() and (may.hi == 1024.0).all() and not may.radius.any()
    verdict = verdict_of(call, output=np.float32([1024.0, 64.0]))  # where bf16 stops
    assert (verdict.status, verdict.symptom, verdict.at.index) == ("diverged", "wrong value", (1,))
    assert "of a " in verdict.remark and "[4096, 2]" in verdict.remark


def test_sums_are_exact_where_all_terms_have_one_unit_and_not_elsewhere() -> None:
    columns = {
        "few units": ([1.0, 2.0, 0.5], True),
        "the largest": ([2.0**24 - 1, 1.0], True),
        "beyond": ([2.0**24, 1.0], False),
        "magnitudes count": ([2.0**23, -(2.0**23), 1.0], False),
        "zeros": ([0.0, 0.0], True),
        "no number": ([np.inf, 1.0], False),
        "subnormal": ([2.0**-130, 2.0**-128], False),
    }
    for name, (terms, exact) in columns.items():
        column = np.asarray(terms)[:, None]
        assert exact_sums(column, (0,)).tolist() == [exact], name


@pytest.mark.parametrize(("terms", "gives"), [
    ([1.0, np.nan], np.nan), ([np.inf, -np.inf], np.nan), ([np.inf, 1.0], np.inf),
    ([-np.inf, -np.inf], -np.inf),
])  # fmt: skip
def test_what_is_not_finite_comes_out_as_such(terms: list[float], gives: float) -> None:
    call = call_of(torch.tensor(terms), 0)
    assert np.array_equal(call.outputs["output"], np.float32(gives), equal_nan=True)
    assert verdict_of(call).status == "ok" or not np.isnan(gives)
    wrong = verdict_of(call, output=np.asarray(5.0, np.float32))
    assert wrong.status == "diverged"
    assert wrong.symptom == ("NaN missing" if np.isnan(gives) else "wrong value")


def test_nan_from_nowhere_and_infinity_are_told_apart() -> None:
    call = call_of(torch.ones(3, 1), 0)
    assert verdict_of(call, output=np.float32([np.nan])).symptom == "NaN from nowhere"
    assert verdict_of(call, output=np.float32([np.inf])).symptom == "not finite"


def test_where_a_sum_may_overflow_on_its_way_nothing_is_said() -> None:
    call = call_of(torch.tensor([[3e38], [3e38], [-3e38]]), 0)
    verdict = verdict_of(call)
    assert (verdict.status, verdict.why) == (
        "inconclusive",
        "every element may overflow or is NaN",
    )


def test_zeros_prove_nothing() -> None:
    verdict = verdict_of(call_of(torch.zeros(4, 2), 0))
    assert (verdict.status, verdict.why) == ("inconclusive", "every element may be 0")


def test_what_is_no_sum_of_these_dtypes_is_not_recorded() -> None:
    watch = OperatorWatch()
    with watch:
        torch.ones(3, dtype=torch.float64).sum(0)
        torch.ones(3, dtype=torch.int64).sum(0)
        torch.ones(3).prod(0)
    assert not watch.operators


def test_a_sum_of_too_many_terms_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(torch.ones(4, 2), 0)

    def void(*args: Any, **kwargs: Any) -> Any:
        return summed(np.broadcast_to(np.float64(1.0), (2**24 + 1, 1)), (0,), FORMATS["fp32"])

    monkeypatch.setattr("narrowfuzz.operators.sum.summed", void)
    verdict = verdict_of(call)
    assert verdict.status == "inconclusive" and "the bound is void" in verdict.why


KNOWN = {"sum_narrow_parts": "an-entry"}


def on_several(x: torch.Tensor, threads: int, *args: Any) -> OperatorCall:
    with on_threads(threads):
        return call_of(x, *args)


def known(call: OperatorCall) -> str:
    (verdict,) = judge_call("eager", call, None, KNOWN)
    return verdict.status


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_each_threads_sum_is_rounded_and_known(dtype: str, threads: int) -> None:
    """40,000 times 2 and 40,000 times -2: the middle one of three threads has some of both."""
    x = torch.cat([torch.full((40000,), 2.0), torch.full((40000,), -2.0)]).to(DTYPES[dtype])
    assert call_of(x).outputs["output"] == 0.0
    call = on_several(x, threads)
    assert call.threads == threads
    wrong = call.outputs["output"] != 0.0  # infinities of both signs are NaN
    right = "inconclusive"  # zeros would be, too
    assert known(call) == ("known" if wrong else right)
    other = OperatorCall(**{**vars(call), "outputs": {"output": np.array(64.0, dtype=np.float32)}})
    assert known(other) == "diverged"
    assert verdict_of(call).status == ("diverged" if wrong else right)


def test_threads_whose_sums_overflow_either_way_may_give_nan_or_an_infinity() -> None:
    x = torch.cat([torch.full((40000,), 2.0), torch.full((40000,), -2.0)]).half()
    call = on_several(x, 2)
    assert np.isnan(call.outputs["output"]) and known(call) == "known"
    assert on_several(x.float(), 2).outputs["output"] == 0.0


def test_a_sum_over_some_dimensions_or_of_few_elements_is_not_shared() -> None:
    for x, dim in ((torch.randn(400, 300), 0), (torch.randn(400), None)):
        call = on_several(x.bfloat16(), 4, *(() if dim is None else (dim,)))
        (deviation,) = OPERATOR.deviations
        assert deviation.expected(call) == {} and known(call) in ("ok", "inconclusive")


def test_iterations_are_dealt_out_as_parallel_for_does() -> None:
    sizes = [[len(range(9)[some]) for some in shares(9, threads)] for threads in (1, 2, 4, 16)]
    assert sizes == [[9], [5, 4], [3, 3, 3], [1] * 9]
    assert [len([*shares(count, 4, 32768)]) for count in (1, 32768, 32769, 10**6)] == [1, 1, 2, 4]
