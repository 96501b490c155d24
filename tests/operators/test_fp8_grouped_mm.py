"""torchao's rowwise FP8 products of groups, as an H200 answered them: what they may be where
operands hold NaN, infinities, or amaxes whose scale is a matter of a logarithm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.operators.fp8_grouped_mm import OPERATOR
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

ARRAYS = np.load(Path(__file__).parent / "h200.npz")
CALLS: list[dict[str, Any]] = json.loads(str(ARRAYS["calls"]))["calls"]
NONE: Mapping[str, str] = {}
HIDES = {"fp8_grouped_nan_hidden": "an-entry"}


def recorded() -> OperatorCall:
    """Two groups of 32 rows, 64 features to 32."""
    number = next(n for n, one in enumerate(CALLS) if one["operator"] == OPERATOR.name)
    one = CALLS[number]
    tensors, outputs = (
        {name: ARRAYS[f"{number}.{name}"].copy() for name in one[what]}
        for what in ("tensors", "outputs")
    )
    return OperatorCall(
        OPERATOR.name, "backward", 0, tensors, outputs, one["dtypes"], {}, {}, device="cuda"
    )


def statuses(call: OperatorCall, deviations: Mapping[str, str] = NONE) -> dict[str, str]:
    found = judge_call("eager", call, None, deviations)
    return {v.at.result or v.role.split(".")[-1]: v.status for v in found}


def with_nan(*, hidden: bool) -> OperatorCall:
    """A NaN in row 3, and what its kernels make of it, or what its references do."""
    call = recorded()
    call.tensors["input"][3, 5] = np.nan
    may = OPERATOR.deviations[0].expected(call) if hidden else OPERATOR.expected(call)
    outputs = {name: np.float32((one.lo + one.hi) / 2) for name, one in may.items()}
    return replace(call, outputs=outputs)


def test_a_nan_must_come_through() -> None:
    kept = with_nan(hidden=False)
    output = kept.outputs["output"]
    assert np.isnan(output[3]).all() and np.isfinite(output[4]).all()
    assert np.isnan(kept.outputs["grad_weight"][0, 5]).all(), "of its group, and of no other"
    assert np.isfinite(kept.outputs["grad_weight"][1]).all()
    assert set(statuses(kept).values()) == {"ok"}


def test_a_nan_that_the_kernels_hide_is_known_and_nothing_else_is() -> None:
    hidden = with_nan(hidden=True)
    assert np.isfinite(hidden.outputs["output"]).all()
    assert statuses(hidden)["output"] == "diverged"
    assert statuses(hidden, HIDES)["output"] == "known"
    hidden.outputs["output"][3, 7] *= 1.5
    assert statuses(hidden, HIDES)["output"] == "diverged", "another wrong number in the same row"
    assert not OPERATOR.deviations[0].expected(recorded()), "without NaN it says nothing"


@pytest.mark.parametrize(
    ("largest", "open_rows"), [(np.inf, [9]), (0.4375 * (1 + 2.0**-23), [9]), (0.4375, [])]
)
def test_scales_that_are_not_to_be_told_leave_their_rows_open(
    largest: float, open_rows: list[int]
) -> None:
    """448 / 0.4375 is 1024, and just below of it a kernel's logarithm in fp32 is 10 as well."""
    call = recorded()
    call.tensors["input"][9] = np.float32(0.25)
    call.tensors["input"][9, 0] = np.float32(largest)
    unknown = OPERATOR.expected(call)["output"].unknown
    assert np.flatnonzero(unknown.any(1)).tolist() == open_rows


def test_rows_behind_the_last_group_are_no_ones() -> None:
    call = recorded()
    tensors = {**call.tensors, "offs": np.float32([32, 48])}
    may = OPERATOR.expected(replace(call, tensors=tensors))
    assert may["output"].unknown[48:].all() and not may["output"].unknown[:48].any()
    assert not may["grad_weight"].unknown.any()


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    call = recorded()
    tensors = {**call.tensors, "offs": np.float32([0, 64])}
    weight = OPERATOR.expected(replace(call, tensors=tensors))["grad_weight"]
    assert (weight.lo[0] == 0).all() and (weight.hi[0] == 0).all()


def test_what_is_padded_or_has_no_offsets_is_said_not_to_be_judged() -> None:
    x, w = torch.ones(32, 32), torch.ones(1, 32, 32)
    named = {"A": x, "B_t": w, "offs": torch.tensor([32]), "pad_token_groups_for_grouped_mm": True}
    for other in (named, named | {"offs": None, "pad_token_groups_for_grouped_mm": False}):
        with pytest.raises(ValueError, match="padded, or have no offsets"):
            OPERATOR.read(other, x)
    with pytest.raises(ValueError, match="two dtypes"):
        OPERATOR.read(named | {"B_t": w.double(), "pad_token_groups_for_grouped_mm": False}, x)
