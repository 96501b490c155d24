"""Sums by index: torch's kernels are inside the bound, or do in narrow dtypes what the deviations
say, to the bit, for every kernel, shape and dimension; wrong ones are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

KNOWN = {"index_put_narrow_sums": "of-put", "index_add_narrow_sums": "of-add"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
put = torch.ops.aten.index_put


def calls_of(run: Callable[[], object]) -> tuple[OperatorCall, ...]:
    with OperatorWatch() as watch:
        run()
    return operators_of(watch.operators)


def every_way(
    base: torch.Tensor, dim: int, ids: torch.Tensor, source: torch.Tensor
) -> tuple[OperatorCall, ...]:
    """The same sums by each kernel, and as what looking up gives in backward."""
    places = ids.view(*(-1 if d == dim else 1 for d in range(base.dim()))).expand(source.shape)

    def run() -> None:
        base.index_add(dim, ids, source)
        base.scatter_add(dim, places, source)
        put(base, [*[None] * dim, ids], source, True)
        base.clone().index_add_(dim, ids, source)
        base.clone().scatter_add_(dim, places, source)
        for look_up in (
            lambda t: t.index_select(dim, ids),
            lambda t: t.gather(dim, places),
            lambda t: t[(*[slice(None)] * dim, ids)],
        ):
            table = base.clone().requires_grad_()
            look_up(table).backward(source)

    return calls_of(run)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_holds_but_for_what_is_known(dtype: str) -> None:
    make = torch.Generator().manual_seed(5)
    met = set()
    for shape, dim in (((3,), 0), ((50, 7), 0), ((7, 3), 1), ((2, 5, 3), 1), ((4, 2, 9), 2)):
        for count in (1, 40, 300):
            ids = torch.randint(0, shape[dim], (count,), generator=make)
            several = [*shape[:dim], count, *shape[dim + 1 :]]
            for base in (torch.zeros(shape), torch.randn(shape, generator=make)):
                source = torch.randn(several, generator=make).to(DTYPES[dtype])
                calls = every_way(base.to(DTYPES[dtype]), dim, ids, source)
                assert len(calls) == 8
                for call in calls:
                    (verdict,) = judge_call("eager", call, None, KNOWN)
                    assert verdict.status in ("ok", "known"), (call.operator, shape, verdict.got)
                    met.add((call.operator, verdict.status))
    assert (("index_put", "known") in met) == (dtype != "fp32")
    assert (("index_add", "known") in met) == (("index_add_", "known") in met) == (dtype != "fp32")
    assert ("scatter_add", "known") not in met


@pytest.mark.parametrize("dtype", DTYPES)
def test_ones_add_up_to_their_number(dtype: str) -> None:
    ids, ones = torch.zeros(4096, dtype=torch.long), torch.ones(4096).to(DTYPES[dtype])
    calls = every_way(torch.zeros(3).to(DTYPES[dtype]), 0, ids, ones)
    for call in calls:
        may = BY_NAME[call.operator].expected(call)["output"]
        assert may.lo[0] == may.hi[0] == 4096.0 and may.lo[1] == may.hi[1] == 0.0
    got = {verdict.got for call in calls for verdict in judge_call("eager", call)}
    assert got == {"fp32": {""}, "bf16": {"", "256"}, "fp16": {"", "2048"}}[dtype]


def test_a_number_lost_or_counted_twice_is_seen() -> None:
    ids = torch.arange(40) % 5
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    for call in every_way(torch.zeros(5, 6), 0, ids, rows):
        (right,) = judge_call("eager", call)
        assert right.status == "ok"
        for factor in (1.0, -1.0):
            wrong = call.outputs["output"].copy()
            wrong[2] += factor * call.tensors["source"][7]
            (verdict,) = judge_call("eager", replace(call, outputs={"output": wrong}))
            assert verdict.status == "diverged" and verdict.at.index[0] == 2
            assert "[40, 6] into a float32 tensor of [5, 6] over dim 0" in verdict.remark


def test_in_place_the_tensor_counts_as_it_was() -> None:
    ids, rows = torch.tensor([0, 2, 2]), torch.tensor([1.0, 2.0, 3.0])
    base = torch.tensor([10.0, 20.0, 30.0])
    (call,) = calls_of(lambda: base.index_add_(0, ids, rows))
    assert call.tensors["input"].tolist() == [10.0, 20.0, 30.0]
    assert call.outputs["output"].tolist() == base.tolist() == [11.0, 20.0, 35.0]
    title = BY_NAME[call.operator].title(call)
    assert title == "torch.Tensor.index_add_ of [3] into a float32 tensor of [3] over dim 0"


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_that_may_add_up_in_16_bits_are_those_that_do(dtype: str, ids: torch.dtype) -> None:
    places = torch.zeros(4096, dtype=ids)
    for shape in ((3,), (3, 4), (3, 1), (3, 4, 5), (2, 3, 4, 5)):
        for dim in range(len(shape)):
            base = torch.zeros(shape, dtype=DTYPES[dtype])
            ones = torch.ones(*shape[:dim], 4096, *shape[dim + 1 :], dtype=DTYPES[dtype])
            for name, run in (("index_add", base.index_add), ("index_add_", base.index_add_)):
                made = run(dim, places, ones)
                (known,) = BY_NAME[name].deviations
                narrow = bool(made.max() < 4096)
                assert known.may_affect([base, places, ones], [made]) is narrow, (shape, dim)


def test_where_the_dimension_is_not_known_every_one_that_fits_counts() -> None:
    base, ids = torch.zeros(3, 3, 3).bfloat16(), torch.arange(3)
    (known,) = BY_NAME["index_add"].deviations
    assert known.may_affect([base, ids, base], [base])
    assert not known.may_affect([base, ids[:2], base[:2]], [base])


def test_a_deviation_excuses_no_other_error() -> None:
    ids, rows = torch.zeros(300, dtype=torch.long), torch.rand(300, 4).bfloat16()
    for call in every_way(torch.zeros(2, 4, dtype=torch.bfloat16), 0, ids, rows):
        if call.operator == "index_put":
            (verdict,) = judge_call("eager", call, None, KNOWN)
            assert verdict.status == "known"
            wrong = {"output": call.outputs["output"] * np.float32(1.25)}
            (verdict,) = judge_call("eager", replace(call, outputs=wrong), None, KNOWN)
            assert verdict.status == "diverged"


def test_what_is_not_judged_says_why() -> None:
    x, ids = torch.ones(4, 3), torch.tensor([0, 1])
    with OperatorWatch() as watch:
        x.index_add(0, ids, x[:2], alpha=2)
        put(x, [ids, ids], torch.ones(2), True)
        put(x, [ids], x[:2], False)
    assert not watch.operators
    assert watch.unjudged == {
        "index_add": "a factor other than 1, or a tensor or an index without dimensions",
        "index_put": "indices in several dimensions, or a mask",
    }


def test_on_a_gpu_atomic_sums_may_round_each_time_in_any_order() -> None:
    ids = torch.zeros(64, dtype=torch.long)
    rows = torch.rand(64, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    zeros, places = torch.zeros(1, 4).bfloat16(), ids[:, None].expand(64, 4)
    (call,) = calls_of(lambda: zeros.scatter_add(0, places, rows))
    there = replace(call, device="cuda")
    total = np.zeros(4, np.float32)
    for row in call.tensors["source"][::-1]:
        total = torch.from_numpy(total + row).bfloat16().float().numpy()
    there = replace(there, outputs={"output": total[None]})
    (verdict,) = judge_call("eager", there)
    assert verdict.status == "ok" and BY_NAME["scatter_add"].unordered(there)
    assert not BY_NAME["scatter_add"].unordered(call)
    (verdict,) = judge_call("eager", replace(there, device="cpu"))
    assert verdict.status == "diverged"


def test_ids_of_several_dimensions_are_walked_as_values_lie_in_memory() -> None:
    make = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 3, (4, 50), generator=make)
    rows = torch.randn(50, 4, 4, generator=make).bfloat16()

    def run() -> None:
        table = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
        table[ids].transpose(0, 1).backward(rows)
        table[ids].backward(rows.transpose(0, 1).contiguous())

    for call in calls_of(run):
        (verdict,) = judge_call("eager", call, None, KNOWN)
        assert verdict.status == "known", call.strides


def test_ids_and_numbers_without_dimensions() -> None:
    def run() -> None:
        torch.zeros(3).scatter_add(0, torch.tensor(1), torch.tensor(5.0))
        torch.zeros(3).scatter_add(0, torch.tensor([1]), torch.tensor(5.0))
        table = torch.zeros(3, requires_grad=True)
        table.gather(0, torch.tensor(1)).backward()

    calls = calls_of(run)
    assert [call.operator for call in calls] == ["scatter_add"] * 3
    assert {verdict.status for call in calls for verdict in judge_call("eager", call)} == {"ok"}
