"""Calls that are too large to judge whole: what is known of some places is what is known of them in
the whole call, and errors there are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators import BY_NAME, fused_attention, large_attention
from narrowfuzz.operators.sampled import elements, judge_sampled, sample_places
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

KNOWN = {"attention_block_sums": "an-entry"}


def attention(rows: int, mask: str, dtype: torch.dtype = torch.float32) -> tuple[OperatorCall, ...]:
    """Forward and backward of two sequences, four heads of queries and two of keys."""
    make = torch.Generator().manual_seed(rows)
    q = torch.randn(2, 4, rows, 8, generator=make).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 2, rows, 8, generator=make).to(dtype).requires_grad_() for _ in "kv")
    how: dict[str, Any] = {"is_causal": mask == "causal"}
    i, j = torch.arange(rows)[:, None], torch.arange(rows)
    if mask == "empty":
        how["attn_mask"] = (i % 3 != 1) & (j >= 0)
    if mask == "keys":
        how["attn_mask"] = (j < rows - 7).expand(2, 1, 1, rows)
    with OperatorWatch() as watch:
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
        y.backward(torch.randn(y.shape, generator=make).to(dtype))
    return operators_of(watch.operators)


@pytest.mark.parametrize("mask", ["", "causal", "empty", "keys"])
def test_some_queries_and_keys_are_held_to_what_they_are_in_the_whole(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = attention(48, mask)
    whole = [BY_NAME[call.operator].expected(call) for call in calls]
    monkeypatch.setattr(large_attention, "_WHOLE", 1)
    monkeypatch.setattr(large_attention, "_SAMPLED", 8 * 48 * 5)
    for call, every in zip(calls, whole, strict=True):
        some = BY_NAME[call.operator].expected(call)
        assert some.keys() == every.keys()
        for name, result in some.items():
            places = ~result.unknown.reshape(*result.unknown.shape[:3], -1).all((0, 1, 3))
            assert places.sum() in (3, 4, 5), "five of 48, but for queries that see nothing"
            known = ~result.unknown
            assert not every[name].unknown[known].any()
            assert np.allclose(result.centre[known], every[name].centre[known], atol=1e-12)
            slack = 1.0 + 1e-6  # the sums of the bound are over fewer rows of the other kind
            assert (result.radius[known] <= every[name].radius[known] * slack).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_attention_is_judged_in_every_head(dtype: torch.dtype) -> None:
    calls = attention(400, "causal", dtype)
    for call in calls:
        for verdict in judge_call("eager", call, None, KNOWN):
            assert verdict.status in ("ok", "known")
    backward = calls[1]
    for name, head in (("grad_query", 3), ("grad_key", 1), ("grad_value", 0)):
        wrong = backward.outputs[name].copy()
        wrong[1, head] *= np.float32(1.25)
        bad = replace(backward, outputs={**backward.outputs, name: wrong})
        (found,) = (v for v in judge_call("eager", bad, None, KNOWN) if v.status == "diverged")
        assert found.at.result == name and found.at.index[:2] == (1, head)


def test_what_even_one_query_a_head_is_too_much_of_says_so() -> None:
    q = np.broadcast_to(np.float32(0.0), (64, 64, 2048, 1))
    call = replace(attention(8, "")[0], tensors={"query": q, "key": q, "value": q})
    with pytest.raises(ValueError, match="takes longer to judge than to compute"):
        BY_NAME["attention"].expected(call)


def test_attentions_own_module_judges_small_calls_whole() -> None:
    call = attention(8, "")[0]
    some, every = BY_NAME["attention"].expected(call), fused_attention.forward_of(call)
    assert (some["output"].lo == every["output"].lo).all()


def test_some_rows_of_every_matrix_stand_for_a_large_product() -> None:
    make = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 300, 128, generator=make), torch.randn(3, 128, 128, generator=make)
    with OperatorWatch() as watch:
        torch.bmm(a, b)
    (call,) = operators_of(watch.operators)
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "ok"
    may = BY_NAME["bmm"].expected(call)["output"]
    rows = ~may.unknown.all((0, 2))
    assert rows[0] and rows[-1] and 10 < rows.sum() < 100 and not may.unknown[:, rows].any()
    wrong = {"output": np.roll(call.outputs["output"], 1, axis=0)}
    (verdict,) = judge_call("eager", replace(call, outputs=wrong))
    assert verdict.status == "diverged" and verdict.at.index[1] in np.flatnonzero(rows)


def test_numbers_that_do_not_depend_on_one_another_are_sampled_in_their_own_shape() -> None:
    x = torch.randn(700, 200, generator=torch.Generator().manual_seed(0))
    with OperatorWatch() as watch:
        F.silu(x)
    (call,) = operators_of(watch.operators)
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "ok"
    may = BY_NAME["silu"].expected(call)["output"]
    assert may.lo.shape == (700, 200) and 2**15 < (~may.unknown).sum() <= 2**16
    wrong = {"output": call.outputs["output"] * np.float32(1.001)}
    (verdict,) = judge_call("eager", replace(call, outputs=wrong))
    assert verdict.status == "diverged"


def test_places_are_spread_over_all() -> None:
    assert sample_places(10, 3).tolist() == [0, 5, 9]
    assert sample_places(10, 0).tolist() == [0] and sample_places(4, 9).tolist() == [0, 1, 2, 3]


def test_results_without_such_a_place_are_left_out() -> None:
    call = attention(8, "")[0]
    found = judge_sampled(
        fused_attention.forward_of, call, {"query": 2, "output": 2}, sample_places(8, 2)
    )
    assert set(found) == {"output"} and found["output"].unknown[:, :, 1:7].all()
    assert set(elements(lambda call: {}, call)) == set()


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_steps_of_a_large_parameter_are_judged_at_some_elements(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.randn(500, 300))
    parameter.grad = torch.randn(500, 300)
    with OperatorWatch() as watch:
        getattr(torch.optim, kind)([parameter], lr=0.5).step()
    (call,) = operators_of(watch.operators)
    assert {verdict.status for verdict in judge_call("eager", call)} == {"ok"}
    wrong = {**call.outputs, "param": call.tensors["param"]}
    found = list(judge_call("eager", replace(call, outputs=wrong)))
    assert [v.at.result for v in found if v.status == "diverged"] == ["param"]


@pytest.mark.parametrize("shape", [(256, 512), (1024, 512), (2048, 1024), (1000, 768)])
def test_every_column_of_a_table_is_judged_in_many_rows(shape: tuple[int, int]) -> None:
    chosen = sample_places(shape[0] * shape[1], 2**16)
    assert np.bincount(chosen % shape[1], minlength=shape[1]).min() >= 25
    assert chosen[0] == 0 and chosen[-1] == shape[0] * shape[1] - 1


@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_is_nan_is_known_in_a_large_attention_too(causal: bool) -> None:
    q = torch.randn(1, 16, 22000, 1, generator=torch.Generator().manual_seed(1))
    q[0, 0, 0] = float("nan")
    k = torch.randn(1, 16, 3, 1, generator=torch.Generator().manual_seed(2))
    with OperatorWatch() as watch:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, causal)
    (call,) = operators_of(watch.operators)
    found = {v.status for v in judge_call("eager", call, None, {"attention_nan_swallowed": "it"})}
    assert "known" in found and "diverged" not in found


def test_some_columns_of_a_large_embeddings_gradient_stand_for_all() -> None:
    ids = torch.randint(0, 50, (600,), generator=torch.Generator().manual_seed(3))
    table = torch.zeros(50, 2000, requires_grad=True)
    with OperatorWatch() as watch:
        F.embedding(ids, table).backward(torch.randn(600, 2000))
    (call,) = operators_of(watch.operators)
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "ok"
    wrong = {"grad_weight": np.roll(call.outputs["grad_weight"], 1, axis=0)}
    (verdict,) = judge_call("eager", replace(call, outputs=wrong))
    assert verdict.status == "diverged"
