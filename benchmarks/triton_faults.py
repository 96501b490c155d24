"""Faults in torchao's Triton kernels for experts and linears, and legal rewrites of these kernels,
to be searched for in Triton's interpreter.

    narrowfuzz score --with triton==3.6.0 --faults benchmarks/triton_faults.py --no-builtin

The faults for experts are at the places where such kernels had bugs in 2026: tiles, empty groups,
padding, scales that are read a row off.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from narrowfuzz import Plant

# a file of plants is executed, not imported: its folder is not searched by itself
if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(here)

from triton_calls import MX, after_launches, plants
from triton_expert_faults import BLOCK_FAULTS, GROUP_FAULTS
from triton_rewrites import REWRITES

_BLOCKWISE = "torchao.prototype.blockwise_fp8_training.linear"


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
        partial(after_launches, module, name, change),
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


PLANTS = [
    *_MOVES,
    *GROUP_FAULTS,
    *plants(
        "mx", MX, False,
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
    *plants(
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
    *BLOCK_FAULTS,
    *REWRITES,
]  # fmt: skip
