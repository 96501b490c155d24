"""Legal rewrites of torchao's Triton kernels: on these no rule may report anything."""

from __future__ import annotations

from typing import Any

from triton_calls import (
    BLOCKS_OF,
    COLUMNS,
    GROUPED,
    IN_BLOCKS,
    MX,
    PRODUCT,
    ROWS,
    TILE,
    groups,
    plants,
)


def _padded_to_two_blocks(pad: Any, x: Any, offs: Any, alignment_size: int = 128) -> Any:
    """Each group is padded to a multiple of twice the alignment."""
    return pad(x, offs, alignment_size=2 * alignment_size)


def _reversed_experts(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """Each group is multiplied in a launch of its own, the last expert first."""
    import torch

    if b.ndim != 3:
        return multiply(a, b, sa, sb, offs, **how)
    result = multiply(a, b, sa, sb, offs, **how)
    for number, rows in reversed([*enumerate(groups(offs))]):
        end = torch.tensor([rows.stop - rows.start], dtype=torch.int32)
        mine = slice(number, number + 1)
        result[rows] = multiply(a[rows], b[mine], sa[rows], sb[mine], end, **how)
    return result


def _two_halves(multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any) -> Any:
    """The contraction is split into two halves, whose products are added in fp32."""
    import torch

    k = a.shape[1] // 2
    if b.ndim != 3 or k % TILE:
        return multiply(a, b, sa, sb, offs, **how)
    dtype = how.pop("out_dtype")
    fp32 = how | {"out_dtype": torch.float32}
    first_half = multiply(a[:, :k], b[:, :k], sa, sb, offs, **fp32)
    return (first_half + multiply(a[:, k:], b[:, k:], sa, sb, offs, **fp32)).to(dtype)


def _noise_behind(multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any) -> Any:
    """Rows that belong to no group hold an arbitrary number."""
    result = multiply(a, b, sa, sb, offs, **how)
    if b.ndim == 3:
        result[int(offs[-1]) :] = 77.0
    return result


def _by_torch(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """torchao's own torch functions in place of the kernel."""
    import torch
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    e4m3, along = torch.float8_e4m3fn, ScalingGranularity.AXISWISE
    scale = tensor_to_scale(
        x, e4m3, scaling_granularity=along, axiswise_dim=-1, round_scales_to_power_of_2=True
    )
    if scale.isinf().any() or not scale.all():
        return cast(x, *args, **how)
    return to_fp8_saturated(x.float() * scale, e4m3), scale


def _groups_by_torch(cast: Any, a: Any, b: Any, offs: Any, *args: Any, **how: Any) -> Any:
    """torchao's own torch functions in place of the kernel for two tensors in groups, if no group
    is empty."""
    from torchao.prototype.moe_training.utils import torch_to_float8_per_group_colwise

    made = cast(a, b, offs, *args, **how)
    full = all(rows.stop > rows.start for rows in groups(offs))
    if not full or not (a.isfinite().all() and b.isfinite().all()):
        return made
    parts = [torch_to_float8_per_group_colwise(x, offs, made[0].dtype, True) for x in (a, b)]
    return tuple(made[i].copy_(parts[i // 2][i % 2]) for i in range(4))


def _one_row_at_a_time(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """Each half of the rows is quantised in a launch of its own."""
    import torch

    half = x.shape[0] // 2
    if not half:
        return cast(x, *args, **how)
    parts = [cast(part.contiguous(), *args, **how) for part in (x[:half], x[half:])]
    codes, scales = (
        torch.cat([t.view(torch.uint8) for t in both]).view(both[0].dtype)
        for both in zip(*parts, strict=True)
    )
    return codes, scales


_SUMS = "docs/rules.md, O25: sums in any order, and codes as torchao's torch functions make them"
_UNWRITTEN = "torch.nn.functional.grouped_mm: elements beyond offs[-1] are ignored"
REWRITES = [
    *IN_BLOCKS(
        f"{BLOCKS_OF}.grouped_mm",
        True,
        (
            "padded-to-256",
            "each group is padded to 256 rows",
            _SUMS,
            "pad_token_groups",
            _padded_to_two_blocks,
        ),
    ),
    *GROUPED(
        True,
        ("reversed", "each group by itself, the last first", _SUMS, PRODUCT, _reversed_experts),
        ("two-halves", "what is contracted in two parts", _SUMS, PRODUCT, _two_halves),
        ("noise-behind", "rows of no group hold 77", _UNWRITTEN, PRODUCT, _noise_behind),
        ("rows-by-torch", "rows as torch's functions quantise them", _SUMS, ROWS, _by_torch),
        (
            "columns-by-torch",
            "groups as torch's functions quantise them",
            _SUMS,
            COLUMNS,
            _groups_by_torch,
        ),
        ("half-the-rows", "rows in two launches", _SUMS, ROWS, _one_row_at_a_time),
    ),
    *plants(
        "mx", MX, True,
        (
            "half-the-rows",
            "rows in two launches",
            "docs/rules.md, O3: each block has a scale of its own",
            "triton_to_mxfp8_dim0",
            _one_row_at_a_time,
        ),
        recipes=("torchao.mxfp8.rceil",),
    ),
]  # fmt: skip
