"""Faults in torchao's Triton kernels for experts and linears, and legal rewrites of these kernels,
to be searched for in Triton's interpreter.

    narrowfuzz score --with triton==3.6.0 --faults benchmarks/triton_faults.py --no-builtin

The faults for experts are at the places where such kernels had bugs in 2026: tiles, empty groups,
padding, scales that are read a row off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any

from narrowfuzz import Plant
from narrowfuzz.plants.patching import attribute_replaced

_GROUPS = "torchao.prototype.moe_training.fp8_grouped_mm"
_ROWS = "triton_fp8_rowwise_2d_scale_and_cast"
_EXPERTS = "triton_fp8_colwise_3d_scale_and_cast"
_TRANSPOSED = "triton_fp8_rowwise_3d_transpose_rhs"
_COLUMNS = "triton_fp8_per_group_colwise_scales_dual"
_MX = "torchao.prototype.mx_formats.mx_tensor"
_BLOCKS_OF = "torchao.prototype.moe_training.blockwise_fp8"
_BLOCKWISE = "torchao.prototype.blockwise_fp8_training.linear"
#: Rows of the smallest group that is drawn.
_TILE = 16


def _changed(module: str, name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(original, *args)`` replaces this function wherever the module calls it."""
    import triton_on_cpu

    triton_on_cpu.install_torchao()  # before anything of torchao is imported
    owner = import_module(module)
    if name.startswith("torch."):
        owner, name = owner.torch, name.removeprefix("torch.")

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: change(original, *args, **kwargs)

    return attribute_replaced(owner, name, make)


def _scales_of_first_expert(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    codes, scales = cast(x, *args, **how)
    return codes, scales[:1].expand_as(scales).contiguous()


def _scales_of_group_before(cast: Any, a: Any, b: Any, offs: Any, *args: Any, **how: Any) -> Any:
    a_codes, a_scales, b_codes, b_scales = cast(a, b, offs, *args, **how)
    return a_codes, a_scales.roll(a.shape[1]), b_codes, b_scales


def _quantised_twice(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """The input is quantised along the other axis and dequantised before the cast."""
    import torch

    scale = 448.0 / x.float().abs().amax(-2, keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    codes = (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    again = (codes.float() / scale).to(x.dtype)
    return cast(torch.empty_like(x).copy_(again), *args, **how)


def _clamped_to_240(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """Codes are clamped to the largest number of E4M3FNUZ, the format of AMD's GPUs."""
    codes, scales = cast(x, *args, **how)
    return codes.float().clamp(-240.0, 240.0).to(codes.dtype), scales


def _as_e5m2(cast: Any, a: Any, b: Any, *args: Any, **how: Any) -> Any:
    """Codes of the gradient are rounded to E5M2, which has two significand bits."""
    import torch

    a_codes, *others = cast(a, b, *args, **how)
    rounded = a_codes.float().to(torch.float8_e5m2).float().to(a_codes.dtype)
    return a_codes.copy_(rounded), *others


def _groups(offs: Any) -> list[slice]:
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _full_tile_loses_column(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """A group of exactly one tile has a column of zeros."""
    result = multiply(a, b, sa, sb, offs, **how)
    for rows in _groups(offs) if b.ndim == 3 else ():
        if rows.stop - rows.start == _TILE:
            result[rows, 0] = 0.0
    return result


def _tile_of_expert_before(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """The last row of a group is multiplied by the matrix of the group before."""
    import torch

    result = multiply(a, b, sa, sb, offs, **how)
    if b.ndim == 3:
        before = b.view(torch.uint8).roll(1, 0).view(b.dtype)
        other = multiply(a, before, sa, sb.roll(1, 0), offs, **how)
        for rows in _groups(offs):
            if rows.stop > rows.start:
                result[rows.stop - 1] = other[rows.stop - 1]
    return result


def _empty_group_unwritten(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """The weight gradient of an expert without tokens is not written: it holds 3 instead of 0."""
    result = multiply(a, b, sa, sb, offs, **how)
    for number, rows in enumerate(_groups(offs)) if b.ndim == 2 else ():
        if rows.stop == rows.start:
            result[number] = 3.0
    return result


def _last_tokens_lost(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """The weight gradient leaves out the tokens after a group's last whole block of 32."""
    import torch

    if b.ndim == 2:
        a = a.clone()
        for rows in _groups(offs):
            lost = (rows.stop - rows.start) % 32
            a.view(torch.uint8)[:, rows.stop - lost : rows.stop] = 0
    return multiply(a, b, sa, sb, offs, **how)


def _last_block_before(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """The last block of a row has the scale of the block before."""
    import torch

    codes, scales = cast(x, *args, **how)
    flat = scales.view(torch.uint8)
    if flat.shape[-1] > 1:
        flat[..., -1] = flat[..., -2]
    return codes, scales


def _floor_for_rceil(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """Scales are rounded down where they should be rounded up."""
    if "scaling_mode" in how:
        how["scaling_mode"] = "floor"
    return cast(x, *args[:1], *["floor" if arg == "rceil" else arg for arg in args[1:]], **how)


def _scales_moved(cast: Any, *args: Any, **how: Any) -> Any:
    """Scales are read a row off."""
    codes, scales = cast(*args, **how)
    return codes, scales.clone().copy_(scales.roll(1, 0))


def _scales_across(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """The scales of square blocks are stored transposed."""
    codes, scales = cast(x, *args, **how)
    turned = scales.t().contiguous().reshape(scales.shape)
    return codes, scales.clone().copy_(turned)


def _full_block_loses_column(multiply: Any, *args: Any) -> Any:
    """A group of exactly one block of rows has a column of zeros."""
    result, offs = multiply(*args), args[6]
    for rows in _groups(offs) if args[1].ndim == 3 else ():
        if rows.stop - rows.start == 128:
            result[rows, 0] = 0.0
    return result


def _padding_repeats(pad: Any, x: Any, offs: Any, **how: Any) -> Any:
    """A group is padded with copies of its last row instead of zeros."""
    padded, starts, ends = pad(x, offs, **how)
    for rows, start, end in zip(_groups(offs), starts.tolist(), ends.tolist(), strict=True):
        count = rows.stop - rows.start
        if count:
            padded[start + count : end] = x[rows.stop - 1]
    return padded, starts, ends


def _scales_of_last_tokens(cast: Any, x: Any, **how: Any) -> Any:
    """All blocks of tokens have the scales of the last block."""
    codes, scales = cast(x, **how)
    return codes, scales.clone().copy_(scales[-1:].expand_as(scales))


def _padded_to_two_blocks(pad: Any, x: Any, offs: Any, alignment_size: int = 128) -> Any:
    """Each group is padded to a multiple of twice the alignment."""
    return pad(x, offs, alignment_size=2 * alignment_size)


def _scales_reversed(cast: Any, x: Any, **how: Any) -> Any:
    """The scales of an expert's square blocks are stored in reverse order along both axes."""
    codes, scales = cast(x, **how)
    return codes, scales.clone().copy_(scales.flip(-1, -2))


def _reversed_experts(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """Each group is multiplied in a launch of its own, the last expert first."""
    import torch

    if b.ndim != 3:
        return multiply(a, b, sa, sb, offs, **how)
    result = multiply(a, b, sa, sb, offs, **how)
    for number, rows in reversed([*enumerate(_groups(offs))]):
        end = torch.tensor([rows.stop - rows.start], dtype=torch.int32)
        mine = slice(number, number + 1)
        result[rows] = multiply(a[rows], b[mine], sa[rows], sb[mine], end, **how)
    return result


def _two_halves(multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any) -> Any:
    """The contraction is split into two halves, whose products are added in fp32."""
    import torch

    k = a.shape[1] // 2
    if b.ndim != 3 or k % _TILE:
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
    full = all(rows.stop > rows.start for rows in _groups(offs))
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


class _Launched:
    """A kernel whose arguments ``change`` may alter after each launch."""

    def __init__(self, kernel: Any, change: Callable[..., None]) -> None:
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **how: Any) -> None:
            self.kernel[grid](*args, **how)
            self.change(*args, **how)

        return launch


def _after_launches(
    module: str, name: str, change: Callable[..., None]
) -> AbstractContextManager[None]:
    import triton_on_cpu

    triton_on_cpu.install_torchao()
    return attribute_replaced(import_module(module), name, lambda kernel: _Launched(kernel, change))


def _last_rank_skipped(
    counts: Any, starts: Any, firsts: Any, numbers: Any, experts: int, ranks: int, **how: Any
) -> None:
    """Experts get no rows from the last of several ranks."""
    if ranks > 1:
        numbers[numbers >= starts[experts * (ranks - 1)]] = -1


def _last_gradient_lost(grad: Any, numbers: Any, output: Any, *args: Any, **how: Any) -> None:
    output[-1] = 0


def _tiles(output: Any) -> Any:
    """The whole tiles of 512 bytes, [tiles, 512]."""
    return output.view(-1)[: output.numel() // 512 * 512].view(-1, 512)


def _last_tile_unmoved(*args: Any, **how: Any) -> None:
    """The last tile that the kernel writes is zero."""
    tiles = _tiles(args[6])
    used = tiles.any(1).nonzero()
    if len(used):
        tiles[used[-1]] = 0


def _rows_halved(*args: Any, **how: Any) -> None:
    """The second half of each tile's groups of rows has the scales of the first half."""
    tiles = _tiles(args[7]).view(-1, 32, 4, 4)
    tiles[:, :, 2:] = tiles[:, :, :2].clone()


_EP = "torchao.prototype.moe_training.ep"
_TILES = "torchao.prototype.moe_training.kernels.mxfp8.quant"
_MOVES: list[Plant] = [
    Plant(
        f"triton-moves-{id}",
        "triton",
        title,
        source,
        ("torch.bf16", "torch.fp32"),
        partial(_after_launches, module, name, change),
        models=(model,),
        arms=("eager",),
    )
    for id, title, source, module, name, change, model in (
        (
            "last-rank-skipped", "experts get no row of the last rank",
            "the class of transformers#45621: rows that nobody writes",
            f"{_EP}.kernels", "_fill_indices_kernel", _last_rank_skipped, "permuted_rows",
        ),
        (
            "last-gradient-lost", "the last row that went to an expert has no gradient",
            "the class of marin#7665: gradients that an exchange cuts",
            f"{_EP}.permute", "_triton_permute_bwd_kernel", _last_gradient_lost, "permuted_rows",
        ),
        (
            "last-tile-unmoved", "the last tile of the scales of groups of rows is zero",
            "the class of rows that nobody writes", _TILES, "triton_scale_swizzle_M_groups",
            _last_tile_unmoved, "mx_scales",
        ),
        (
            "upper-half-twice", "tiles of groups of columns have scales of their upper half twice",
            "the class of scales that are read a block off", _TILES,
            "triton_scale_swizzle_2d_K_groups", _rows_halved, "mx_scales",
        ),
    )
]  # fmt: skip


def _plants(
    of: str, module: str, legal: bool, *rows: tuple[str, str, str, str, Callable[..., Any]],
    recipes: tuple[str, ...], models: tuple[str, ...] = (),
) -> list[Plant]:  # fmt: skip
    return [
        Plant(
            f"triton-{of}-{id}",
            "triton",
            title,
            source,
            recipes,
            partial(_changed, module, name, change),
            legal=legal,
            models=models,
            arms=("eager",),
        )
        for id, title, source, name, change in rows
    ]


_GROUPED = partial(
    _plants,
    "groups",
    _GROUPS,
    recipes=("torch.bf16", "torch.fp32"),
    models=("fp8_grouped_rowwise",),
)
_IN_BLOCKS = partial(
    _plants,
    "group-blocks",
    recipes=("torch.bf16", "torch.fp32"),
    models=("fp8_grouped_blockwise", "fp8_grouped_blockwise_straddled"),
)
_SUMS = "docs/rules.md, O25: sums in any order, and codes as torchao's torch functions make them"
_UNWRITTEN = "torch.nn.functional.grouped_mm: elements beyond offs[-1] are ignored"
_PRODUCT = "torch._scaled_grouped_mm"
PLANTS = [
    *_MOVES,
    *_GROUPED(
        False,
        (
            "scales-of-first-expert",
            "weights of all experts are multiplied by the scales of the first",
            "the class of https://github.com/huggingface/kernels-community/issues/1153",
            _EXPERTS,
            _scales_of_first_expert,
        ),
        (
            "scales-of-group-before",
            "the gradient of a group has the scales of the group before in the weight gradient",
            "the class of https://github.com/pytorch/ao/pull/4113",
            _COLUMNS,
            _scales_of_group_before,
        ),
        (
            "weight-quantised-twice",
            "the input gradient is of weights that were quantised already",
            "the class of casts from a cache",
            _TRANSPOSED,
            _quantised_twice,
        ),
        (
            "clamped-to-240",
            "codes of rows end at E4M3FNUZ's largest number",
            "the class of https://github.com/meta-pytorch/MSLK/pull/392",
            _ROWS,
            _clamped_to_240,
        ),
        (
            "gradient-as-e5m2",
            "the gradient in a weight gradient has two bits, not three",
            "the class of recipes whose gradients are E5M2",
            _COLUMNS,
            _as_e5m2,
        ),
        (
            "full-tile-loses-column",
            "a group of exactly one tile has a column of zeros",
            "the class of https://github.com/deepseek-ai/DeepGEMM/issues/365",
            _PRODUCT,
            _full_tile_loses_column,
        ),
        (
            "tile-of-expert-before",
            "the last row of a group is multiplied by the matrix of the group before",
            "the class of https://github.com/huggingface/kernels-community/issues/1153",
            _PRODUCT,
            _tile_of_expert_before,
        ),
        (
            "empty-group-unwritten",
            "an expert without tokens has a weight gradient that nobody wrote",
            "the class of https://github.com/tgale96/grouped_gemm/issues/36",
            _PRODUCT,
            _empty_group_unwritten,
        ),
        (
            "last-tokens-lost",
            "a weight gradient ends with the last whole 32 tokens of a group",
            "the class of https://github.com/huggingface/kernels-community/issues/1153",
            _PRODUCT,
            _last_tokens_lost,
        ),
    ),
    *_plants(
        "mx", _MX, False,
        (
            "last-block-has-scale-before",
            "the last block of a row has the scale of the block before",
            "the class of scales that are read a block off",
            "triton_to_mxfp8_dim0",
            _last_block_before,
        ),
        (
            "floor-for-rceil",
            "scales are rounded down where they should be rounded up",
            "the class of scaling modes that are mixed up",
            "triton_to_mxfp8_dim0",
            _floor_for_rceil,
        ),
        recipes=("torchao.mxfp8.rceil",),
    ),
    *_plants(
        "blockwise", _BLOCKWISE, False,
        (
            "weight-scales-across",
            "scales of the weight's squares lie the other way round",
            "the class of transposed scales",
            "triton_fp8_blockwise_weight_quant_transposed_rhs",
            _scales_across,
        ),
        (
            "row-scales-moved",
            "scales of the input's blocks are read a row off",
            "the class of scales that are read a row off",
            "triton_fp8_blockwise_act_quant_lhs",
            _scales_moved,
        ),
        recipes=("torchao.blockwise_fp8",),
    ),
    *_IN_BLOCKS(
        f"{_BLOCKS_OF}.grouped_mm",
        False,
        (
            "padding-repeats",
            "padding of a group is its last row again",
            "the class of https://github.com/pytorch/ao/issues/2849",
            "pad_token_groups",
            _padding_repeats,
        ),
    ),
    *_IN_BLOCKS(
        f"{_BLOCKS_OF}.grouped_mm_backend",
        False,
        (
            "full-block-loses-column",
            "a group of exactly one block of rows has a column of zeros",
            "the class of https://github.com/deepseek-ai/DeepGEMM/issues/365",
            "emulated_blockwise_scaled_grouped_mm",
            _full_block_loses_column,
        ),
        (
            "scales-of-last-tokens",
            "all blocks of tokens are read with the scales of the last",
            "the class of scales that are read a block off",
            "triton_fp8_blockwise_act_quant_rhs",
            _scales_of_last_tokens,
        ),
        (
            "weight-scales-across",
            "scales of an expert's squares lie the other way round",
            "the class of transposed scales",
            "triton_fp8_blockwise_weight_quant_grouped_rhs",
            _scales_reversed,
        ),
    ),
    *_IN_BLOCKS(
        f"{_BLOCKS_OF}.grouped_mm",
        True,
        (
            "padded-to-256",
            "each group is padded to 256 rows",
            _SUMS,
            "pad_token_groups",
            _padded_to_two_blocks,
        ),
    ),
    *_GROUPED(
        True,
        ("reversed", "each group by itself, the last first", _SUMS, _PRODUCT, _reversed_experts),
        ("two-halves", "what is contracted in two parts", _SUMS, _PRODUCT, _two_halves),
        ("noise-behind", "rows of no group hold 77", _UNWRITTEN, _PRODUCT, _noise_behind),
        ("rows-by-torch", "rows as torch's functions quantise them", _SUMS, _ROWS, _by_torch),
        (
            "columns-by-torch",
            "groups as torch's functions quantise them",
            _SUMS,
            _COLUMNS,
            _groups_by_torch,
        ),
        ("half-the-rows", "rows in two launches", _SUMS, _ROWS, _one_row_at_a_time),
    ),
    *_plants(
        "mx", _MX, True,
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
