"""Gradients of embeddings: torch's kernel is inside the bound in fp32, and in narrow dtypes it does
what the deviation says, to the bit; a wrong one is seen beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules.expected import outside
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

OPERATOR = BY_NAME["embedding_backward"]
KNOWN = {"embedding_narrow_sums": "an-entry"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def call_of(
    ids: torch.Tensor, rows: int, dtype: str, *, ones: bool = False, padding: int | None = None
) -> OperatorCall:
    make = torch.Generator().manual_seed(3)
    table = torch.randn(rows, 8, generator=make).to(DTYPES[dtype]).requires_grad_()
    dy = torch.ones(*ids.shape, 8) if ones else torch.randn(*ids.shape, 8, generator=make)
    watch = OperatorWatch()
    with watch:
        F.embedding(ids, table, padding_idx=padding).backward(dy.to(DTYPES[dtype]))
    (call,) = operators_of(watch.operators)
    return call


def ids_of(count: int, rows: int) -> torch.Tensor:
    return torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [None, 0])
def test_the_bound_holds_but_for_what_is_known(dtype: str, padding: int | None) -> None:
    for count, rows in ((4096, 1), (400, 3), (64, 50), (7, 90), (0, 4)):
        call = call_of(ids_of(count, rows).reshape(-1, 1), rows, dtype, padding=padding)
        (verdict,) = judge_call("eager", call, None, KNOWN)
        assert verdict.status in ("ok", "known", "inconclusive"), (count, rows)
        assert verdict.status != "known" or dtype != "fp32"
        may = OPERATOR.expected(call)["grad_weight"]
        never = np.bincount(call.tensors["indices"].ravel().astype(int), minlength=rows) == 0
        assert not may.hi[never].any() and not may.lo[never].any(), "no id, no gradient"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_sums_are_followed_to_the_bit(dtype: str) -> None:
    call = call_of(ids_of(4096, 50), 50, dtype)
    may = OPERATOR.deviations[0].expected(call)["grad_weight"]
    assert (may.lo == call.outputs["grad_weight"]).all()
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "diverged", "without the ledger it is a finding"


def test_ones_add_up_to_their_number_and_in_bf16_to_256() -> None:
    ids = torch.zeros(4096, dtype=torch.long)
    may = OPERATOR.expected(call_of(ids, 2, "fp32", ones=True))["grad_weight"]
    assert (may.lo[0] == 4096.0).all() and (may.hi[0] == 4096.0).all()
    (verdict,) = judge_call("eager", call_of(ids, 2, "bf16", ones=True))
    assert (verdict.got, verdict.at.index) == ("256", (0, 0))
    assert (
        verdict.remark
        == "the backward of torch.embedding of a bfloat16 tensor of [4096, 8] is wrong"
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_another_bug_is_seen_beside_what_is_known(dtype: str) -> None:
    with builtin_faults()["embedding-gradient-loses-repeats"].plant():
        call = call_of(ids_of(40, 9), 9, dtype)
    (verdict,) = judge_call("eager", call, None, KNOWN)
    assert (verdict.status, verdict.symptom) == ("diverged", "wrong value")


def test_an_id_that_comes_once_is_exact() -> None:
    call = call_of(torch.arange(9), 9, "bf16")
    may = OPERATOR.expected(call)["grad_weight"]
    assert (may.lo == may.hi).all() and not outside(may, call.outputs["grad_weight"]).any()
