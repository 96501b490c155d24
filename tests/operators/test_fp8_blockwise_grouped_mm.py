"""torchao's blockwise FP8 products of groups: what an H200 answered is what is expected, and what
its kernels make of NaN is known from anything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.operators.fp8_blockwise_grouped_mm import OPERATOR
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall

ARRAYS = np.load(Path(__file__).parent / "h200.npz")
CALLS: list[dict[str, Any]] = json.loads(str(ARRAYS["calls"]))["calls"]
NONE: Mapping[str, str] = {}
HIDES = {"blockwise_nan_hidden": "an-entry"}


def recorded(*, padded: bool) -> OperatorCall:
    """Groups of 1, 0 and 16 rows that are padded; or one of 128, with NaN in its row 1 and in the
    weight, infinities in row 2 and in the gradient, and zeros."""
    number = next(
        n
        for n, one in enumerate(CALLS)
        if one["operator"] == OPERATOR.name and one["settings"]["padded"] == padded
    )
    one = CALLS[number]
    tensors, outputs = (
        {name: ARRAYS[f"{number}.{name}"].copy() for name in one[what]}
        for what in ("tensors", "outputs")
    )
    return OperatorCall(
        OPERATOR.name, "backward", 0, tensors, outputs, one["dtypes"], {}, one["settings"],
        device="cuda",
    )  # fmt: skip


def statuses(call: OperatorCall, deviations: Mapping[str, str] = NONE) -> dict[str, str]:
    found = judge_call("eager", call, None, deviations)
    return {v.at.result or v.role.split(".")[-1]: v.status for v in found}


def test_groups_that_are_padded_are_as_a_gpu_has_them() -> None:
    call = recorded(padded=True)
    assert statuses(call) == {"output": "ok", "grad_weight": "ok"}
    may = OPERATOR.expected(call)
    assert not any(one.unknown.any() for one in may.values())
    assert (may["grad_weight"].lo[1] == 0).all() and (may["grad_weight"].hi[1] == 0).all()
    for name in call.outputs:
        call.outputs[name].flat[-1] *= np.float32(1.0625)
    assert set(statuses(call).values()) == {"diverged"}


def test_one_scale_for_two_rows_is_seen() -> None:
    """Rows of 128 have a scale each, and weights one for 128 of them."""
    call = recorded(padded=True)
    call.tensors["input"][3] *= np.float32(1.25)
    assert statuses(call)["output"] == "diverged"


def test_what_the_kernels_make_of_nan_is_known_and_nothing_else_is() -> None:
    call = recorded(padded=False)
    assert set(statuses(call).values()) == {"diverged"}
    assert set(statuses(call, HIDES).values()) == {"known"}
    may = OPERATOR.expected(call)["output"]
    assert may.unknown[2].all() and may.unknown.sum() == may.unknown.shape[1], "of the infinity"
    call.outputs["output"][9, 7] *= np.float32(1.5)
    assert statuses(call, HIDES)["output"] == "diverged"
    assert not OPERATOR.deviations[0].expected(recorded(padded=True)), "without NaN it says nothing"


def test_a_block_may_straddle_groups_that_nobody_pads() -> None:
    """A large token of the next group is in a block of 128 with those of this one, and makes its
    scale: a number that was a subnormal code is 0."""
    call = recorded(padded=True)
    tensors = {name: x[..., :128] for name, x in call.tensors.items() if name != "grad_output"}
    rows = np.ones((256, 128), np.float32)
    rows[100:] = 2.0**20
    tensors |= {"input": rows, "offs": np.float32([100, 100, 256])}
    tensors["grad_output"] = np.ones((256, 128), np.float32)
    outputs = {"output": np.zeros((256, 128)), "grad_weight": np.zeros(tensors["mat2"].shape)}
    call = replace(call, tensors=tensors, outputs=outputs)
    alone = OPERATOR.expected(call)["grad_weight"].centre[0]
    straddled = OPERATOR.expected(replace(call, settings={"padded": False}))["grad_weight"]
    assert np.allclose(alone, 100.0, rtol=0.02)
    assert (straddled.centre[0] == 0.0).all()


def test_what_is_not_judged_is_said() -> None:
    x, w = torch.ones(128, 128), torch.ones(1, 128, 128)
    named = {
        "A": x,
        "B_t": w,
        "offs": torch.tensor([128]),
        "out_dtype": torch.bfloat16,
        "pad_token_groups_for_grouped_mm": True,
        "kernel_preference": SimpleNamespace(name="AUTO"),
    }
    read = OPERATOR.read(named, x)
    assert not isinstance(read, list) and read is not None and read.settings == {"padded": True}
    for other in ({"B_t": w.double()}, {"out_dtype": torch.float32}):
        with pytest.raises(ValueError, match="two dtypes"):
            OPERATOR.read(named | other, x)
    with pytest.raises(ValueError, match="run backwards, or beyond the end"):
        OPERATOR.read(named | {"offs": torch.tensor([129])}, x)
    assert OPERATOR.read(named, x[:0]) is None
