"""What kernels of a GPU answered, on record (``h200.npz``: device, release, calls): operators are
as exact as is said of that device, and what is known of its kernels accounts for the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import OperatorWatch, operators_of
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.rules.repeat import check_repeat
from narrowfuzz.trace.trace import OperatorCall, Trace

ARRAYS = np.load(Path(__file__).parent / "h200.npz")
CALLS: list[dict[str, Any]] = json.loads(str(ARRAYS["calls"]))["calls"]
KNOWN = {"embedding_chunked_sums": "an-entry", "embedding_narrow_sums": "of-a-cpu"}


def call_of(number: int, device: str = "cuda") -> OperatorCall:
    recorded = CALLS[number]
    tensors, outputs = (
        {name: ARRAYS[f"{number}.{name}"] for name in recorded[what]}
        for what in ("tensors", "outputs")
    )
    return OperatorCall(
        recorded["operator"],
        "backward",
        0,
        tensors,
        outputs,
        recorded["dtypes"],
        {},
        recorded["settings"],
        device=device,
    )


def of(*operators: str) -> list[int]:
    return [n for n, call in enumerate(CALLS) if call["operator"] in operators]


@pytest.mark.parametrize("number", of("embedding_backward"))
def test_an_embedding_adds_up_by_32_ids(number: int) -> None:
    call = call_of(number)
    (verdict,) = judge_call("eager", call, None, KNOWN)
    assert (verdict.status, verdict.explained_by) == ("known", "an-entry")
    (alone,) = judge_call("eager", call)
    assert alone.status == "diverged", "without the ledger it is a finding"
    (elsewhere,) = judge_call("eager", call_of(number, "cpu"), None, KNOWN)
    assert elsewhere.status == "diverged", "a CPU's kernel has no such arithmetic"
    grad = call.outputs["grad_weight"]
    grad[0, 0] *= np.float32(1.0625)
    (neighbour,) = judge_call("eager", call, None, KNOWN)
    assert neighbour.status == "diverged" and neighbour.at.index == (0, 0)


@pytest.mark.parametrize("number", of("softmax_backward"))
def test_softmax_rounds_the_products_that_it_adds_up(number: int) -> None:
    (verdict,) = judge_call("eager", call_of(number))
    assert verdict.status == "ok"
    (elsewhere,) = judge_call("eager", call_of(number, "cpu"))
    assert elsewhere.status == "diverged", "a CPU's kernel adds them up in fp32"
    spoilt = call_of(number)
    dy, y = spoilt.tensors["grad_output"], spoilt.tensors["output"]
    spoilt.outputs["grad_input"][:] = dy * y  # the sum is lost
    (neighbour,) = judge_call("eager", spoilt)
    assert neighbour.status == "diverged"


KERNELS = ("flash", "efficient", "cudnn")
FORWARD = of(*(f"attention_{kernel}" for kernel in KERNELS))
BACKWARD = of(*(f"attention_{kernel}_backward" for kernel in KERNELS))


OTHERS = of(
    "fp8_grouped_mm",
    "fused_rms_norm",
    "fused_rms_norm_backward",
    "nll_loss",
    "nll_loss_backward",
)


@pytest.mark.parametrize("number", FORWARD + BACKWARD + OTHERS)
def test_kernels_are_within_their_bounds(number: int) -> None:
    call = call_of(number)
    verdicts = list(judge_call("eager", call))
    assert {verdict.status for verdict in verdicts} == {"ok"}
    assert len(verdicts) == len(call.outputs)


@pytest.mark.parametrize("number", FORWARD)
def test_attention_that_misses_a_key_is_seen(number: int) -> None:
    call = call_of(number)
    last = call.tensors["value"].copy()
    last[..., -1, :] += 4.0  # as if the kernel had read another one
    if call.settings["causal"]:
        last[..., 0, :] += 4.0
    spoilt = replace(call, tensors={**call.tensors, "value": last})
    statuses = {v.at.result: v.status for v in judge_call("eager", spoilt) if v.at is not None}
    assert statuses.get("output") == "diverged"


@pytest.mark.parametrize("number", BACKWARD)
def test_a_backward_without_its_correction_is_seen(number: int) -> None:
    call = call_of(number)
    tensors = {**call.tensors, "out": np.zeros_like(call.tensors["out"])}
    found = {v.at.result for v in judge_call("eager", replace(call, tensors=tensors))
             if v.status == "diverged"}  # fmt: skip
    assert {"grad_query", "grad_key"} <= found and "grad_value" not in found


@pytest.mark.parametrize("number", OTHERS)
def test_a_wrong_result_is_seen(number: int) -> None:
    call = call_of(number)
    for name, x in call.outputs.items():
        spoilt = replace(call, outputs={**call.outputs, name: x * np.float32(1.03125)})
        found = [v.at.result or name for v in judge_call("eager", spoilt)
                 if v.status == "diverged"]  # fmt: skip
        assert found == [name]


def of_slope(name: str, dtype: torch.dtype) -> OperatorCall:
    """A backward of tanh or the logistic function as an H200 answers it, to the bit: each operation
    rounds to the operands' dtype (all 65,536 results of a forward, four gradients)."""
    make = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(64, 64, generator=make).to(dtype) for _ in range(2))
    y = getattr(torch, name)(x)
    with OperatorWatch() as watch:
        getattr(torch.ops.aten, f"{name}_backward")(dy, y)
    (call,) = operators_of(watch.operators)
    stepwise = dy * (1 - y * y) if name == "tanh" else dy * (1 - y) * y
    return replace(call, outputs={"grad_input": stepwise.float().numpy()}, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slopes_are_rounded_on_a_gpu(dtype: torch.dtype) -> None:
    known = {"tanh_gradient_narrow_square": "narrow-square"}
    tanh, sigmoid = of_slope("tanh", dtype), of_slope("sigmoid", dtype)
    (of_tanh,) = judge_call("eager", tanh, None, known)
    (of_sigmoid,) = judge_call("eager", sigmoid)
    assert (of_tanh.status, of_sigmoid.status) == ("known", "ok")
    (unexplained,) = judge_call("eager", tanh)
    assert unexplained.status == "diverged"
    for call in (tanh, sigmoid):
        spoilt = replace(
            call, outputs={"grad_input": call.outputs["grad_input"] * np.float32(1.05)}
        )
        (neighbour,) = judge_call("eager", spoilt, None, known)
        assert neighbour.status == "diverged"


def test_atomic_additions_of_subnormal_numbers_may_be_nothing() -> None:
    source, ids = torch.full((64,), 1e-39), torch.arange(64) // 63
    source[63] = 1.0
    with OperatorWatch() as watch:
        torch.scatter_add(torch.zeros(2), 0, ids, source)
    (call,) = operators_of(watch.operators)
    answered = np.array([0.0, 1.0], dtype=np.float32)
    flushed = replace(call, outputs={"output": answered}, device="cuda")
    (verdict,) = judge_call("eager", flushed)
    assert verdict.status == "ok"
    (elsewhere,) = judge_call("eager", replace(flushed, device="cpu"))
    assert elsewhere.status == "diverged", "a CPU keeps them"
    normal = replace(flushed, tensors={**call.tensors, "source": call.tensors["source"] * 2.0**20})
    (neighbour,) = judge_call("eager", normal)
    assert neighbour.status == "diverged"


def cudnn_call(dtype: torch.dtype, keys: int, fill: float) -> OperatorCall:
    """A backward of cuDNN's with a mask of one row, as a CPU's kernel answers it."""
    make = torch.Generator().manual_seed(keys)
    q, k, v, dy = (torch.randn(1, 1, n, 16, generator=make).to(dtype) for n in (5, keys, keys, 5))
    mask = torch.zeros(5, keys, dtype=dtype)
    mask[3] = fill
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    watch = OperatorWatch()
    with watch:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).backward(dy)
    calls = operators_of(watch.operators)
    (call,) = (call for call in calls if call.operator == "attention_backward")
    return replace(call, operator="attention_cudnn_backward", device="cuda")


@pytest.mark.parametrize(("dtype", "fill"), [(torch.bfloat16, -65504.0), (torch.float16, -20.0)])
def test_a_padded_tile_of_cudnn_is_known_where_the_scores_are_far_below_zero(
    dtype: torch.dtype, fill: float
) -> None:
    known = {"attention_padded_tile": "an-entry"}

    def statuses(call: OperatorCall, *rows: int) -> dict[str, str]:
        grad = call.outputs["grad_query"].copy()
        grad[..., list(rows), :] = np.nan
        spoilt = replace(call, outputs={**call.outputs, "grad_query": grad})
        return {
            v.role.rpartition(".")[2]: v.status for v in judge_call("eager", spoilt, None, known)
        }

    call = cudnn_call(dtype, 64, fill)
    assert set(statuses(call).values()) == {"ok"}
    assert statuses(call, 3) == {"grad_query": "known", "grad_key": "ok", "grad_value": "ok"}
    assert statuses(call, 2)["grad_query"] == "diverged", "a row that is not masked"
    assert statuses(call, 2, 3)["grad_query"] == "diverged"
    assert statuses(cudnn_call(dtype, 96, fill), 3)["grad_query"] == "diverged", "no such tile"


@pytest.mark.parametrize(
    ("kernel", "keys", "varies"),
    [("efficient", 65, True), ("efficient", 64, False), ("cudnn", 512, True), ("", 512, False)],
)
def test_two_runs_may_differ_where_a_kernel_adds_up_in_no_fixed_order(
    kernel: str, keys: int, varies: bool
) -> None:
    name = "_".join(filter(None, ("attention", kernel, "backward")))
    call = replace(cudnn_call(torch.float32, keys, 0.0), operator=name)
    runs = [Trace("eager", outputs={"grad_input": np.full((2, 2), x, np.float32)}) for x in (1, 2)]
    spec = Spec(recipe="torch.fp32", model="sdpa", dtype="fp32")
    evidence = Evidence(
        Case(spec=spec, data=DataSpec()),
        {"eager": replace(runs[0], operators=(call,))},
        repeats={"eager": runs[1]},
    )
    (verdict,) = check_repeat(evidence)
    assert verdict.status == ("not_applicable" if varies else "diverged")


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_the_fused_adam_of_a_gpu_may_keep_its_betas_in_fp32(kind: str) -> None:
    """Of 3.0 twice: exp_avg_sq is what an H200 answered, 1.3e-5 below what 0.999 makes of it."""
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    options |= {"maximize": False, "foreach": None, "fused": True}
    first = {"exp_avg": 0.30000007152557373, "exp_avg_sq": 0.008999884128570557}
    after = {"exp_avg": 0.5700001120567322, "exp_avg_sq": 0.01799076795578003}
    tensors, outputs = (
        {name: np.array([x], np.float32) for name, x in given.items()}
        for given in (
            {"param": -0.0010000000474974513, "grad": 3.0, **first},
            {"param": -0.001999996602535248, **after},
        )
    )
    dtypes = dict.fromkeys(("param", "grad", *first), "fp32")
    settings = {"kind": kind, "options": options, "steps": 1}
    call = OperatorCall(
        "adam_step", "optimizer", 0, tensors, outputs, dtypes, {}, settings, device="cuda"
    )

    def statuses(call: OperatorCall) -> list[str]:
        return [verdict.status for verdict in judge_call("eager", call)]

    assert statuses(call) == ["ok"] * 3
    assert statuses(replace(call, device="cpu")) == ["inconclusive", "ok", "diverged"]
    slow = replace(call, settings={**settings, "options": {**options, "fused": False}})
    assert statuses(slow) == ["inconclusive", "ok", "diverged"]
    outputs["exp_avg_sq"] *= np.float32(1.0 + 2e-5)
    assert "diverged" in statuses(call)


def test_infinities_of_a_chunk_of_ids_are_known_to_cancel_to_nan() -> None:
    grad = np.zeros((64, 1), np.float32)
    grad[[0, 1]], grad[[32, 33]] = 60000.0, -60000.0
    tensors = {"grad_output": grad, "indices": np.zeros(64, np.float32)}
    dtypes = dict.fromkeys((*tensors, "grad_weight"), "fp16")
    made = {"grad_weight": np.full((1, 1), np.nan, np.float32)}
    settings = {"rows": 1, "padding": -1}
    call = OperatorCall(
        "embedding_backward", "backward", 0, tensors, made, dtypes, {}, settings, device="cuda"
    )
    (verdict,) = judge_call("eager", call, None, KNOWN)
    assert verdict.explained_by == "an-entry"
    (other,) = judge_call("eager", replace(call, outputs={"grad_weight": grad[:1]}), None, KNOWN)
    assert other.status == "diverged"


def test_an_exponential_that_is_flushed_counts_as_often_as_the_sum() -> None:
    """log_softmax's gradient beside a far larger logit, as an H200 answers it: 0."""
    dy, y = (np.array([x], np.float32) for x in ([64.0, 64.0, 0.0], [0.0, -88.5, -200.0]))
    right = dy - np.exp(y) * dy.sum()
    right[0, 1:] = 64.0, 0.0
    assert judged_backward(dy, y, right) == "ok"
    flushed = np.array([[-64.0, 64.0, -0.0]], np.float32)
    assert judged_backward(dy, y, flushed) == "ok"
    assert judged_backward(dy, y, flushed + np.float32([0.0, 0.0, 1e-35])) == "diverged"


def judged_backward(dy: Any, y: Any, got: Any) -> str:
    tensors, dtypes = (
        {"grad_output": dy, "output": y},
        dict.fromkeys(("grad_output", "output"), "fp32"),
    )
    call = OperatorCall(
        "log_softmax_backward",
        "backward",
        0,
        tensors,
        {"grad_input": got},
        {**dtypes, "grad_input": "fp32"},
        {},
        {"dim": 1},
        device="cuda",
    )
    (verdict,) = judge_call("eager", call)
    return verdict.status
