"""MX scales in tiles: torchao's own references in torch are what is expected of its kernels, byte
for byte; and what its kernel may make of MXFP8."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.operators import BY_NAME
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from torchao.prototype.moe_training.kernels.mxfp8 import quant
from torchao.prototype.mx_formats.utils import to_blocked

#: By the operator: the shape of its scales, and torchao's reference.
REFERENCES: dict[str, tuple[tuple[int, ...], Any]] = {
    "mx_block_rearrange": ((130, 9), lambda x, offs: to_blocked(x)),
    "mx_block_rearrange_per_group_3d": (
        (3, 130, 9),
        lambda x, offs: quant.torch_to_blocked_per_group_3d(x),
    ),
    "mx_block_rearrange_2d_M_groups": (
        (300, 8),
        lambda x, offs: quant.torch_to_blocked_2d_M_groups(x, offs)[0],
    ),
    "mx_block_rearrange_2d_K_groups": (
        (130, 300),
        lambda x, offs: quant.torch_to_blocked_2d_K_groups(x, offs)[0],
    ),
}
ENDS = (1, 1, 130, 300)


def called(name: str, dtype: torch.dtype = torch.uint8) -> OperatorCall:
    shape, reference = REFERENCES[name]
    make = torch.Generator().manual_seed(0)
    scales = torch.randint(0, 256, shape, generator=make, dtype=torch.uint8).view(dtype)
    offs = torch.tensor(ENDS, dtype=torch.int32)
    made = reference(scales, offs)
    named = {"scales_tensor" if "groups" in name else "scale_tensor": scales}
    read = BY_NAME[name].read(named | {"input_offsets": offs}, made)
    assert read is not None and not isinstance(read, list)
    tensors, outputs = (
        {n: t.numpy() for n, t in given.items()} for given in (read.tensors, read.outputs)
    )
    dtypes = dict.fromkeys((*tensors, *outputs), "fp32")
    return OperatorCall(name, "forward", 0, tensors, outputs, dtypes, {}, dict(read.settings))


OF_E8M0 = ("mx_block_rearrange_2d_K_groups", torch.float8_e8m0fnu)  # others' references copy bytes


@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.uint8) for n in REFERENCES), OF_E8M0])
def test_references_are_what_is_expected(name: str, dtype: torch.dtype) -> None:
    call = called(name, dtype)
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "ok"
    wrong = call.outputs["output"].copy()
    wrong.ravel()[[16, 20]] = wrong.ravel()[[20, 16]] + [0, 1]
    (verdict,) = judge_call("eager", replace(call, outputs={"output": wrong}))
    assert verdict.status == "diverged" and verdict.at.index


def test_what_is_behind_the_last_group_must_be_zero() -> None:
    call = called("mx_block_rearrange_2d_M_groups")
    call.outputs["output"].flat[-1] = 1.0
    (verdict,) = judge_call("eager", call)
    assert verdict.status == "diverged" and (verdict.expect, verdict.got) != ("", "0")


def dequantised(scale: int, got: list[float], dtype: str = "float32") -> list[bool]:
    """May a code of 1, one of -448 and a NaN with this scale be that?"""
    tensors = {"input": np.float32([[1.0, -448.0, np.nan]]), "scales": np.float32([[scale]])}
    outputs = {"output": np.float32([got])}
    dtypes = dict.fromkeys((*tensors, *outputs), "fp32")
    call = OperatorCall(
        "mxfp8_dequant_dim0", "forward", 0, tensors, outputs, dtypes, {}, {"dtype": dtype}
    )
    may = BY_NAME[call.operator].expected(call)["output"]
    nan = np.isnan(may.lo) & np.isnan(outputs["output"])
    inside: list[bool] = (nan | ((may.lo <= outputs["output"]) & (outputs["output"] <= may.hi)))[
        0
    ].tolist()
    return inside


def test_a_code_is_multiplied_by_its_power_of_two() -> None:
    nan = float("nan")
    assert all(dequantised(127, [1.0, -448.0, nan]))
    assert all(dequantised(254, [2.0**127, -np.inf, nan], "bfloat16"))
    assert all(dequantised(255, [nan, nan, nan]))
    assert dequantised(128, [1.0, -896.0, 0.0]) == [False, True, False]
    # 2^-127, the smallest scale, is no normal number: a GPU takes it for zero
    assert all(dequantised(0, [0.0, -0.0, nan])) and all(dequantised(0, [2.0**-127, 0.0, nan]))
    assert dequantised(0, [2.0**-126, 1.0, nan]) == [False, False, True]


def test_what_is_not_judged_is_said() -> None:
    codes = torch.ones(2, 32).to(torch.float8_e4m3fn)
    named = {"e4m3_data": codes, "e8m0_scales": torch.ones(2, 1).to(torch.float8_e8m0fnu)}
    with pytest.raises(ValueError, match="scales that are no bytes"):
        BY_NAME["mxfp8_dequant_dim0"].read(named, SimpleNamespace())
