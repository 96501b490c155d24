"""What kernels of a GPU answered, on record (``h200.json``: device, release, calls): operators are
as exact as is said of that device, and what is known of its kernels accounts for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

RECORD = json.loads((Path(__file__).parent / "h200.json").read_text())
KNOWN = {"embedding_chunked_sums": "an-entry", "embedding_narrow_sums": "of-a-cpu"}


def call_of(recorded: dict[str, Any], device: str = "cuda") -> OperatorCall:
    tensors, outputs = (
        {name: np.array(values, dtype=np.float32) for name, values in recorded[what].items()}
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


def of(operator: str) -> list[Any]:
    calls = [call for call in RECORD["calls"] if call["operator"] == operator]
    return [pytest.param(call, id=f"{n}") for n, call in enumerate(calls)]


@pytest.mark.parametrize("recorded", of("embedding_backward"))
def test_an_embedding_adds_up_by_32_ids(recorded: dict[str, Any]) -> None:
    call = call_of(recorded)
    (verdict,) = judge_call("eager", call, None, KNOWN)
    assert (verdict.status, verdict.explained_by) == ("known", "an-entry")
    (alone,) = judge_call("eager", call)
    assert alone.status == "diverged", "without the ledger it is a finding"
    (elsewhere,) = judge_call("eager", call_of(recorded, "cpu"), None, KNOWN)
    assert elsewhere.status == "diverged", "a CPU's kernel has no such arithmetic"
    grad = call.outputs["grad_weight"]
    grad[0, 0] *= np.float32(1.0625)
    (neighbour,) = judge_call("eager", call, None, KNOWN)
    assert neighbour.status == "diverged" and neighbour.at.index == (0, 0)


@pytest.mark.parametrize("recorded", of("softmax_backward"))
def test_softmax_rounds_the_products_that_it_adds_up(recorded: dict[str, Any]) -> None:
    (verdict,) = judge_call("eager", call_of(recorded))
    assert verdict.status == "ok"
    (elsewhere,) = judge_call("eager", call_of(recorded, "cpu"))
    assert elsewhere.status == "diverged", "a CPU's kernel adds them up in fp32"
    spoilt = call_of(recorded)
    dy, y = spoilt.tensors["grad_output"], spoilt.tensors["output"]
    spoilt.outputs["grad_input"][:] = dy * y  # the sum is lost
    (neighbour,) = judge_call("eager", spoilt)
    assert neighbour.status == "diverged"
