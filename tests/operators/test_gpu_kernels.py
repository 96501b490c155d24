"""What kernels of a GPU answered, on record (``h200.npz``: device, release, calls): operators are
as exact as is said of that device, and what is known of its kernels accounts for the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

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


OTHERS = of("fused_rms_norm", "fused_rms_norm_backward", "nll_loss", "nll_loss_backward")


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
