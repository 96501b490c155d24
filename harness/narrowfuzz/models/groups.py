"""Models of a single grouped GEMM, as experts use it: torch's, and torchao's in MXFP8 and FP8, with
the casts and movements of rows that go with them. Each group of rows has a matrix of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowfuzz.models.model import Arguments, Model
from narrowfuzz.models.relations import of_gradients
from narrowfuzz.models.single_operator import has, operator_model

_MXFP8_GROUPS = "prototype/moe_training/mxfp8_grouped_mm.py"
_FP8_ROWWISE = "prototype/moe_training/fp8_grouped_mm.py"
#: Grouped GEMMs raise an error for parameters with gaps in memory.
_WHOLE = {"weight_layout": "contiguous"}
#: Numbers of rows in the groups: none, one, and around the tile sizes of kernels.
_UNEVEN = (1, 0, 16, 17, 15, 128, 129, 127)
#: Largest number of elements in the matrices of all experts together.
_EXPERTS = 2**17


def _grouped(spec: Any, *, sizes: tuple[int, ...], behind: int) -> Arguments:
    experts = min(spec.n, max(1, _EXPERTS // spec.k**2))
    return spec.k, experts, sizes, behind


def _quantised(
    spec: Any, *, sizes: tuple[int, ...], block: int, how: tuple[Any, ...], most: int = 128
) -> Arguments:
    width = spec.k - spec.k % -block
    experts = min(spec.n, most, max(1, _EXPERTS // width**2))
    return spec.k, experts, sizes, block, *how


def _cast(spec: Any, *, kernel: str, across: bool) -> Arguments:
    return spec.k, kernel, _OF_CASTS[spec.n % len(_OF_CASTS)], across


def _permuted(spec: Any, *, triton: bool) -> Arguments:
    return spec.k, *_OF_EXPERTS[spec.n % len(_OF_EXPERTS)], triton


PRODUCTS: tuple[Model, ...] = tuple(
    operator_model(
        f"grouped_{name}",
        f"products of groups of rows, {title}",
        "GroupedProducts",
        partial(_grouped, sizes=sizes, behind=behind),
        "grouped_mm",
        values=("equal", "outlier_rows", "heavy_tail"),
        columns="experts",
        fixed=_WHOLE,
        # among so many weights, one is nearly always too small for a relation that scales
        relations=of_gradients("up", "down", scaled=False),
    )
    for name, title, sizes, behind in (
        ("uneven", "none, one, and about 16 and 128 of them", _UNEVEN, 0),
        ("tail", "about 16 and 128, and rows that are no group's", _UNEVEN, 5),
        ("last", "all in the last group", (0,), 0),
    )
)

_of_torchao = partial(
    operator_model, compiled=False, fixed=_WHOLE, lacks={"cpu": ("fp16",), "cuda": ("fp16",)}
)
#: Triton's interpreter takes a few milliseconds per row.
_interpreted = partial(
    _of_torchao, interpreted=True, fixed={**_WHOLE, "batch": 0, "steps": 1, "microbatches": 1}
)
#: Numbers of rows that are multiples of the block size 32 in each group, and others.
_BLOCKS, _RAGGED = (32, 0, 64), (1, 0, 16, 40, 33)
_QUANTISED_GROUPS = tuple(
    _of_torchao(
        f"mxfp8_grouped_{name}",
        f"MXFP8 products of groups of rows, {title}",
        "QuantisedGroups",
        partial(_quantised, sizes=sizes, block=32, how=("mxfp8", mode, hp, padded)),
        "mxfp8_grouped_mm",
        "grouped_mm",
        values=("outlier_rows", "heavy_tail", "scale_ends"),
        columns="experts",
        # torchao documents groups in multiples of 32; others crash the GPU in backward
        # (docs/unrun.md)
        device="cpu" if name == "floor" else "",
    )
    for name, title, sizes, mode, hp, padded in (
        ("rceil", "rceil, whole blocks", _BLOCKS, "rceil", False, False),
        ("floor", "floor, groups that share blocks", _RAGGED, "floor", False, False),
        ("hp", "rceil, the weight gradient in bf16", _RAGGED, "rceil", True, False),
        ("padded", "rceil, groups padded to whole blocks", _RAGGED, "rceil", False, True),
    )
)

_IDLE_GROUPS = _of_torchao(
    "mxfp8_grouped_idle",
    "MXFP8 products of groups without a row",
    "QuantisedGroups",
    partial(_quantised, sizes=(), block=32, how=("mxfp8", "rceil", False, False)),
    "mxfp8_grouped_mm",
    columns="experts",
)

#: Numbers of rows: multiples of 16, as torchao documents, and around the tile sizes of kernels.
_SIXTEENS = (16, 0, 32, 128, 112, 144)
_FP8_GROUPS = _interpreted(
    "fp8_grouped_rowwise",
    "FP8 products of groups of rows, one scale a row",
    "QuantisedGroups",
    partial(_quantised, sizes=_SIXTEENS, block=16, how=("fp8",), most=8),
    "fp8_grouped_mm",
    "fp8_rowwise_2d_scale_and_cast",
    "fp8_colwise_3d_scale_and_cast",
    "fp8_rowwise_transpose_rhs",
    "fp8_per_group_colwise_scales_dual",
    values=("outlier_rows", "heavy_tail", "scale_ends"),
    columns="experts",
)
#: Numbers of rows: any, which torchao pads; and multiples of 16 at which blocks of 128 cross the
#: boundaries of groups.
_PADDED, _STRADDLING = (1, 0, 16, 128, 129, 127), (16, 0, 112, 144, 240)
_FP8_BLOCKS = tuple(
    _interpreted(
        f"fp8_grouped_blockwise{name}",
        f"FP8 products of groups of rows in blocks of 128, {title}",
        "QuantisedGroups",
        partial(_quantised, sizes=sizes, block=128, how=("fp8_blockwise", padded), most=4),
        "fp8_blockwise_grouped_mm",
        "grouped_mm",
        values=("outlier_rows", "heavy_tail", "scale_ends"),
        columns="experts",
    )
    for name, title, sizes, padded in (
        ("", "which torchao pads", _PADDED, True),
        ("_straddled", "which they straddle", _STRADDLING, False),
    )
)
#: Numbers of rows in groups that kernels for experts quantise separately: equal sizes, an empty
#: group, and sizes so different that whatever fits most groups does not fit all.
_OF_CASTS = ((32, 32), (16, 0, 48), (112, 400), (64,), (16, 16, 16, 16), (272, 16))
_FP8_CASTS = tuple(
    _interpreted(
        f"fp8_cast_{name}",
        f"FP8 casts of groups, {title}",
        "GroupCasts",
        partial(_cast, kernel=f"triton_fp8_per_group_{kernel}", across=name == "rows"),
        f"fp8_per_group_{kernel}",
        values=("outlier_rows", "heavy_tail", "scale_ends"),
        columns="kinds of groups",
    )
    for name, title, kernel in (
        ("rows", "one scale a row", "rowwise_scales"),
        ("columns", "one scale a column", "colwise_scales"),
        ("both", "of two tensors, one scale a column", "colwise_scales_dual"),
    )
)

#: Sizes of groups of scales, whose tiles have 128 rows or 4 columns: equal sizes, an empty group,
#: around a tile; numbers of experts that are a power of two, and others.
_OF_SCALES = ((4, 4), (1, 0, 7), (128, 130), (5,), (2, 2, 2, 2), (127, 4, 1))
_MX_SCALES = _interpreted(
    "mx_scales",
    "MX scales moved into tiles, and MXFP8 dequantised",
    "MxScales",
    lambda spec: (spec.k, _OF_SCALES[spec.n % len(_OF_SCALES)]),
    "mx_block_rearrange",
    "mx_block_rearrange_per_group_3d",
    "mx_block_rearrange_2d_M_groups",
    "mx_block_rearrange_2d_K_groups",
    "mxfp8_dequant_dim0",
    values=("outlier_rows", "subnormal", "near_max"),
    columns="kinds of groups",
)

#: (ranks, experts, numbers of rows that a rank sends to an expert, repeated in a cycle): around a
#: block of 32, around the 128 and 256 rows that a program of the kernel moves, and none; a single
#: expert, and numbers of experts that are no power of two.
_OF_EXPERTS = (
    (2, 2, (3, 2, 1)),
    (2, 3, (0, 33, 1, 32, 0)),
    (2, 1, (130,)),
    (3, 2, (0, 0, 0, 7)),
    (1, 3, (128, 1)),
)
_PERMUTED = tuple(
    _interpreted(
        f"permuted_rows{name}",
        f"rows moved to experts, and gradients back by {by}",
        "PermutedRows",
        partial(_permuted, triton=triton),
        "permuted_rows",
        "permuted_rows_gradient",
        values=("outlier_rows",),
        columns="kinds of groups",
        lacks=dict.fromkeys(("cpu", "cuda"), ("fp16", "fp32")),
    )
    for name, by, triton in (("", "a kernel", True), ("_by_torch", "torch", False))
)

QUANTISED: tuple[Model, ...] = (
    *((*_QUANTISED_GROUPS, _IDLE_GROUPS) if has(_MXFP8_GROUPS, of="torchao") else ()),
    *(
        (_FP8_GROUPS, *_FP8_BLOCKS, *_FP8_CASTS, _MX_SCALES, *_PERMUTED)
        if has(_FP8_ROWWISE, of="torchao")
        else ()
    ),
)
