"""The casts of torchao's experts: what torchao's own torch references give is what is expected of
the kernels, to the bit, and what is known of these kernels is told from anything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.operators import BY_NAME
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.moe_training import utils

E4M3 = torch.float8_e4m3fn
ENDS = (32, 48, 96)
NONE: Mapping[str, str] = {}


def by_axis(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    along = ScalingGranularity.AXISWISE
    scale = tensor_to_scale(x, E4M3, False, scaling_granularity=along, axiswise_dim=axis,
                            round_scales_to_power_of_2=True)  # fmt: skip
    return to_fp8_saturated(x.float() * scale, E4M3), scale


def experts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = zip(*(by_axis(matrix, 0) for matrix in x), strict=True)
    return torch.stack(codes), torch.stack(scales)


def transposed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = x.transpose(1, 2).contiguous().transpose(1, 2)
    return utils.torch_to_3d_rowwise_float8_transpose_rhs(columns, E4M3, True)


def offsets() -> torch.Tensor:
    return torch.tensor(ENDS, dtype=torch.int32)


#: By the kernel: the shape of what it takes, whether that is in groups, and torchao's reference.
REFERENCES: dict[str, tuple[tuple[int, ...], bool, Callable[[torch.Tensor], Any]]] = {
    "fp8_rowwise_2d_scale_and_cast": ((96, 40), False, lambda x: by_axis(x, -1)),
    "fp8_colwise_3d_scale_and_cast": ((3, 32, 48), False, experts),
    "fp8_rowwise_transpose_rhs": ((3, 32, 48), False, transposed),
    "fp8_rowwise_transpose_rhs_fused": ((3, 32, 48), False, transposed),
    "fp8_per_group_rowwise_scales": (
        (40, 96), True, lambda x: utils.torch_to_float8_per_group_rowwise(x, offsets(), E4M3, True)
    ),
    "fp8_per_group_colwise_scales": (
        (96, 40), True, lambda x: utils.torch_to_float8_per_group_colwise(x, offsets(), E4M3, True)
    ),
    "fp8_per_group_colwise_scales_dual": (
        (96, 40), True, lambda x: utils.torch_to_float8_per_group_colwise(x, offsets(), E4M3, True)
    ),
}  # fmt: skip


def called(name: str, change: Callable[[torch.Tensor], None] = lambda x: None) -> OperatorCall:
    shape, grouped, reference = REFERENCES[name]
    make = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=make) * torch.exp2(
        torch.randint(-9, 10, shape, generator=make).float()
    )
    x = x.bfloat16()
    change(x)
    made = reference(x)
    named = {
        **({"hp_tensor_1": x, "hp_tensor_2": x} if name.endswith("dual") else {"hp_tensor": x}),
        **({"offsets": offsets()} if grouped else {}),
        "output_dtype": E4M3,
        "round_scales_to_power_of_2": True,
    }
    read = BY_NAME[name].read(named, made * 2 if name.endswith("dual") else made)
    assert isinstance(read, list)
    first: Any = read[0]
    numbers = [{n: t.float().numpy() for n, t in given.items()}
               for given in (first.tensors, first.outputs)]  # fmt: skip
    dtypes = dict.fromkeys((*first.tensors, *first.outputs), "fp32") | {"input": "bf16"}
    return OperatorCall(name, "forward", 0, *numbers, dtypes, {}, dict(first.settings))


def statuses(call: OperatorCall, deviations: Mapping[str, str] = NONE) -> dict[str, str]:
    found = judge_call("eager", call, None, deviations)
    return {v.at.result or v.role.split(".")[-1]: v.status for v in found}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_what_is_expected(name: str) -> None:
    call = called(name)
    assert statuses(call) == {"codes": "ok", "scales": "ok"}
    for result in ("codes", "scales"):
        wrong = call.outputs[result].copy()
        wrong.flat[7] *= 2.0
        bad = replace(call, outputs={**call.outputs, result: wrong})
        assert statuses(bad)[result] == "diverged"


@pytest.mark.parametrize("name", REFERENCES)
def test_a_nan_must_keep_its_code(name: str) -> None:
    def with_nan(x: torch.Tensor) -> None:
        x.view(-1)[5] = torch.nan

    call = called(name, with_nan)
    assert set(statuses(call).values()) == {"ok"}
    hidden = BY_NAME[name].deviations[0].expected(call)
    call = replace(call, outputs={n: np.float32(one.lo) for n, one in hidden.items()})
    assert statuses(call)["codes"] == "diverged"
    known = {"fp8_grouped_nan_hidden": "an-entry"}
    assert statuses(call, known)["codes"] == "known"
    call.outputs["codes"].flat[-1] += 64.0  # of a row without one
    assert statuses(call, known)["codes"] == "diverged"


def test_what_is_in_no_group_is_left_open() -> None:
    call = called("fp8_per_group_colwise_scales")
    tensors = {**call.tensors, "offs": np.float32([32, 48, 64])}
    may = BY_NAME[call.operator].expected(replace(call, tensors=tensors))
    assert may["codes"].unknown[64:].all() and not may["codes"].unknown[:64].any()


def by_average(call: OperatorCall) -> Mapping[str, Any]:
    every = BY_NAME[call.operator].deviations
    return next(d.expected(call) for d in every if d.name == "fp8_groups_by_average")


def cast_in_groups(
    shape: tuple[int, int], ends: tuple[int, ...], device: str = "cpu"
) -> OperatorCall:
    """As the kernel of one pass does it."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    settings = {"kernel": "triton_fp8_per_group_colwise_scales", "power_of_two": True}
    sizes = {"codes": shape, "scales": (len(ends), shape[1])}
    outputs = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    tensors = {"input": x, "offs": np.float32(ends)}
    call = OperatorCall(
        "fp8_per_group_colwise_scales", "forward", 0, tensors, outputs,
        dict.fromkeys((*tensors, *outputs), "fp32"), {}, settings, device=device,
    )  # fmt: skip
    return replace(call, outputs={n: np.float32(one.lo) for n, one in by_average(call).items()})


def test_rows_that_the_average_forgets_are_known_and_no_others() -> None:
    """Groups of 16 and 272 rows: the kernel of one pass takes 256 at once."""
    call = cast_in_groups((288, 8), (16, 288))
    made, known = call.outputs, {"fp8_groups_by_average": "an-entry"}
    assert np.isnan(made["codes"][272:]).all() and np.isfinite(made["codes"][:272]).all()
    assert statuses(call)["codes"] == "diverged" and statuses(call, known)["codes"] == "known"
    made["codes"][3, 3] = np.nan
    assert statuses(call, known)["codes"] == "diverged"
    even = replace(call, tensors={**call.tensors, "offs": np.float32([144, 288])})
    assert not by_average(even)


def test_on_a_gpu_unwritten_rows_hold_anything() -> None:
    """And the scales of a block that is not full are written over those of the next group."""
    call = cast_in_groups((288, 40), (16, 288), device="cuda")
    known = {"fp8_groups_by_average": "one", "fp8_groups_by_columns_mask": "other"}
    call.outputs["codes"][272:, 3] = (np.nan, *range(15))
    assert statuses(call, known)["codes"] == "known"
    call.outputs["scales"][1, :24] = 2.0**48
    assert statuses(call)["scales"] == "diverged" and statuses(call, known)["scales"] == "known"
    call.outputs["scales"][1, 24] = 2.0**48
    assert statuses(call, known)["scales"] == "diverged", "24 rows of a block are not there"
    call.outputs["scales"][1, 24], call.outputs["scales"][0, 3] = 1.0, 2.0**48
    assert statuses(call, known)["scales"] == "diverged", "before the first group there is none"


def test_other_formats_are_said_not_to_be_judged() -> None:
    named = {"hp_tensor": torch.ones(2, 2), "output_dtype": torch.float8_e5m2}
    with pytest.raises(ValueError, match="another format than E4M3"):
        BY_NAME["fp8_rowwise_2d_scale_and_cast"].read(named, SimpleNamespace())
