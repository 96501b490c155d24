"""Attention in one kernel: torch's is inside the bounds, what is known of it is followed, and wrong
kernels are seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.operators.fused_attention import GRADIENTS
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

KNOWN = {"attention_block_sums": "blocks", "attention_nan_swallowed": "nan"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Queries, keys, width: about the blocks of the kernel, and the registers of a CPU.
SHAPES = (
    (33, 37, 17),
    (1, 128, 64),
    (64, 64, 32),
    (5, 9, 8),
    (16, 15, 4),
    (1, 1, 1),
    (200, 70, 16),
)


def calls_of(q: Any, k: Any, v: Any, dy: Any, **how: Any) -> tuple[OperatorCall, ...]:
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    watch = OperatorWatch()
    with watch:
        grouped = q.shape[1] != k.shape[1]
        F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **how).backward(dy)
    return tuple(c for c in operators_of(watch.operators) if c.operator.startswith("attention"))


def drawn(dtype: str, shape: tuple[int, int, int], heads: tuple[int, int] = (2, 2)) -> Any:
    """q, k, v and the gradient of the output."""
    make = torch.Generator().manual_seed(sum(shape))
    rows, columns, width = shape
    sizes = ((heads[0], rows), (heads[1], columns), (heads[1], columns), (heads[0], rows))
    return tuple(torch.randn(1, h, n, width, generator=make).to(DTYPES[dtype]) for h, n in sizes)


def values(q: Any, k: Any, v: Any, dy: Any) -> Iterator[tuple[Any, Any, Any, Any, dict[str, Any]]]:
    """Classes of values and masks."""
    rows, columns = q.shape[-2], k.shape[-2]
    seen = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) < 0.4
    seen[rows // 2] = False
    ahead = k.clone()
    ahead[:, :, columns // 3] = 30.0
    ends = torch.where(torch.arange(q.shape[-1]) % 3 == 0, 1.0, -1.0)
    spread = q.clone()
    spread[..., ::16, :] = (-8.0 * ends).to(q.dtype)
    late = torch.full_like(dy, 2.0**-9)
    late[:, :, :32] = 1.0
    yield q, k, v, dy, {}
    yield q, k, v, dy, {"is_causal": True}
    yield q, k, v, dy, {"attn_mask": seen}
    yield q, k, v, dy, {"attn_mask": torch.where(seen, 0.0, -1e4).to(q.dtype)}
    yield q * 0, k, v, dy, {}
    yield q * 40, k * 8, v, dy, {}
    yield q, ahead, v, dy, {}
    yield spread, (k.float() + 2.0 * ends).to(k.dtype), v, dy, {}
    yield q * 0, k, v.abs(), late, {}
    yield q * 2.0**-20, k * 2.0**-20, v * 2.0**-20, dy, {}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bounds_hold(dtype: str, shape: tuple[int, int, int]) -> None:
    judged = 0
    for q, k, v, dy, how in values(*drawn(dtype, shape)):
        for call in calls_of(q, k, v, dy, **how):
            for verdict in judge_call("eager", call, None, KNOWN):
                allowed = ("ok", "inconclusive", "known")
                assert verdict.status in allowed, (how, verdict.got, verdict.remark)
                assert verdict.status != "known" or dtype != "fp32"
                judged += verdict.status == "ok"
    assert judged >= 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_queries_may_share_one_of_keys(dtype: str) -> None:
    for heads in ((4, 2), (4, 1)):
        for call in calls_of(*drawn(dtype, (40, 24, 16), heads), is_causal=True):
            found = {v.status for v in judge_call("eager", call, None, KNOWN)}
            assert found == {"ok"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_over_blocks_are_known_and_others_are_not(dtype: str) -> None:
    q, k, v, dy = drawn(dtype, (4096, 16, 16), (1, 1))
    dy = torch.full_like(dy, 2.0**-9 if dtype == "bf16" else 2.0**-12)
    dy[:, :, :256] = 1.0
    (_, call) = calls_of(q * 0, k, v, dy)
    found = {v.at.result: v for v in judge_call("eager", call) if v.status == "diverged"}
    assert set(found) == {"grad_value"}, "without the ledger it is a finding"
    statuses = [v.status for v in judge_call("eager", call, None, KNOWN)]
    assert "known" in statuses and "diverged" not in statuses
    grad = call.outputs["grad_value"].copy()
    grad[0, 0, 3] *= np.float32(0.875)  # less than all blocks, in every order
    spoilt = replace(call, outputs={**call.outputs, "grad_value": grad})
    assert "diverged" in [v.status for v in judge_call("eager", spoilt, None, KNOWN)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_is_nan_gives_nan(dtype: str) -> None:
    for columns in (3, 64):
        q, k, v, dy = drawn(dtype, (6, columns, 8))
        q[0, 1, 2, 0] = math.nan
        call = calls_of(q, k, v, dy)[0]
        (verdict, *_) = judge_call("eager", call)
        assert verdict.status == ("diverged" if columns == 3 else "ok")
        (verdict, *_) = judge_call("eager", call, None, KNOWN)
        assert verdict.status == ("known" if columns == 3 else "ok")
        output = call.outputs["output"].copy()
        output[0, 1, 2] = 1.0
        spoilt = replace(call, outputs={**call.outputs, "output": output})
        (verdict, *_) = judge_call("eager", spoilt, None, KNOWN)
        assert (verdict.status, verdict.got) == ("diverged", "1")


def wrong(name: str, call: OperatorCall) -> dict[str, Any]:
    """The results of a kernel with a fault."""
    spoilt = {key: x.copy() for key, x in call.outputs.items()}
    if name == "two rows exchanged":
        spoilt["output"][:, :, [3, 4]] = spoilt["output"][:, :, [4, 3]]
    elif name == "a log-sum-exp in base 2":
        spoilt["logsumexp"] *= np.float32(1.4426950408889634)
    elif name == "gradient of the query five times as large":
        spoilt["grad_query"] *= 5.0
    elif name == "the last query gives keys nothing":
        dy, out = (call.tensors[n][:, :, -1:].astype(np.float64) for n in ("grad_out", "out"))
        p, dp = _of_last(call, dy)
        ds = p * (dp - (dy * out).sum(-1, keepdims=True)) * call.settings["scale"]
        q = call.tensors["query"][:, :, -1:].astype(np.float64)
        spoilt["grad_key"] -= (ds.swapaxes(-1, -2) @ q).astype(np.float32)
    elif name == "gradient of value without probabilities":
        spoilt["grad_value"][:] = call.tensors["grad_out"].mean(-2, keepdims=True)
    return spoilt


def _of_last(call: OperatorCall, dy: Any) -> tuple[Any, Any]:
    q, k, v = (call.tensors[n].astype(np.float64) for n in ("query", "key", "value"))
    s = q[:, :, -1:] @ k.swapaxes(-1, -2) * call.settings["scale"]
    lse = call.tensors["logsumexp"].reshape(*s.shape[:2], -1)[..., -1:, None]
    return np.exp(s - lse), dy @ v.swapaxes(-1, -2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("two rows exchanged", "output"),
        ("a log-sum-exp in base 2", "logsumexp"),
        ("gradient of the query five times as large", "grad_query"),
        ("the last query gives keys nothing", "grad_key"),
        ("gradient of value without probabilities", "grad_value"),
    ],
)
def test_a_wrong_kernel_is_seen(dtype: str, name: str, result: str) -> None:
    forward, backward = calls_of(*drawn(dtype, (33, 37, 16)))
    call = backward if result in GRADIENTS else forward
    spoilt = replace(call, outputs=wrong(name, call))
    found = [
        v.at.result for v in judge_call("eager", spoilt, None, KNOWN) if v.status == "diverged"
    ]
    assert found == [result]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least", [True, False])
def test_keys_masked_by_a_large_number_leave_the_others_judged(dtype: str, least: bool) -> None:
    q, k, v, dy = drawn(dtype, (24, 24, 16))
    number = torch.finfo(DTYPES[dtype]).min if least else -6e4
    mask = torch.zeros(24, 24).masked_fill(torch.ones(24, 24).triu(1) > 0, number).to(q.dtype)
    forward, backward = calls_of(q, k, v, dy, attn_mask=mask)
    for call in (forward, backward):
        found = {v.status for v in judge_call("eager", call, None, KNOWN)}
        assert found == {"ok"}
    for call, result in ((forward, "output"), *((backward, name) for name in GRADIENTS)):
        spoilt = {key: x.copy() for key, x in call.outputs.items()}
        spoilt[result][0, 1, 5] *= np.float32(1.1)
        said = judge_call("eager", replace(call, outputs=spoilt), None, KNOWN)
        assert [v.at.result for v in said if v.status == "diverged"] == [result]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_hold_beside_masks_of_every_size(dtype: str) -> None:
    draw, judged = torch.Generator().manual_seed(7), 0
    for number in (torch.finfo(DTYPES[dtype]).min, -3e4, -6e4, -700.0, -760.0):
        for scale in (1.0, 30.0, 400.0):
            q, k, v, dy = drawn(dtype, (20, 37, 16))
            hidden = torch.rand(20, 37, generator=draw) < 0.6
            hidden[3] |= scale == 30.0
            mask = torch.where(hidden, number, torch.randn(20, 37, generator=draw)).to(q.dtype)
            for call in calls_of(q * scale, k, v, dy, attn_mask=mask):
                found = list(judge_call("eager", call, None, KNOWN))
                assert all(v.status in ("ok", "inconclusive", "known") for v in found)
                judged += sum(v.status == "ok" for v in found)
    assert judged


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_that_may_overflow_in_base_2_leave_their_row_open(dtype: str, sign: float) -> None:
    """A GPU multiplies scores by log2(e): those of a row that is masked by a number fp32 barely
    holds are minus infinity there, and so is its log-sum-exp."""
    q, k, v, dy = drawn(dtype, (24, 24, 16))
    hidden = torch.ones(24, 24).triu(1) > 0
    hidden[5] = True
    number = -3e38 if dtype == "fp32" else torch.finfo(torch.bfloat16).min
    mask = torch.zeros(24, 24).masked_fill(hidden, number).to(q.dtype)
    mask[5] *= sign
    forward, _ = calls_of(q, k, v, dy, attn_mask=mask)
    for row, status in ((5, "ok"), (6, "diverged"), (23, "diverged")):
        lse = forward.outputs["logsumexp"].copy()
        lse[0, :, row] = sign * -math.inf
        other = replace(forward, outputs={**forward.outputs, "logsumexp": lse})
        _, verdict = judge_call("eager", other)
        assert verdict.status == status, (row, verdict.remark)


def test_what_is_no_attention_of_its_own_is_left_alone() -> None:
    q, k, v, dy = drawn("fp32", (4, 4, 4))
    assert not calls_of(q, k, v, dy, scale=0.0), "all scores are 0"
    assert len(calls_of(q, k, v, dy, scale=-0.5)) == 2
    assert not calls_of(q, k, v, dy, dropout_p=0.5), "torch composes it"


def test_sums_that_overflow_before_they_are_divided_are_left_open() -> None:
    q, k, v, dy = drawn("bf16", (8, 8, 4))
    large = torch.full_like(v, 1.5e38)
    call = calls_of(q * 0, k, large, dy)[0]
    assert np.isinf(call.outputs["output"]).all(), "eight of them add up to more than fp32 holds"
    (output, *_) = judge_call("eager", call)
    assert output.status == "inconclusive"
    (output, *_) = judge_call("eager", calls_of(q * 0, k, large / 16, dy)[0])
    assert output.status == "ok"
