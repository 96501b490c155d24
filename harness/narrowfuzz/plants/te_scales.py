"""TransformerEngine's current and block scaling with wrong scales, or codes that do not match them.

Each fault has the mechanism of a real bug, planted in ``transformer_engine.pytorch`` where it would
stand there; where no report of one is known, its link is the definition that it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant

_BLOCK = 32


def with_attribute(attribute: str, value: Any) -> Callable[..., Any]:
    """The quantizer's ``attribute`` has this value, whatever the recipe states."""

    def quantize(original: Any, quantizer: Any, tensor: Any) -> Any:
        before = getattr(quantizer, attribute)
        setattr(quantizer, attribute, value)
        try:
            return original(quantizer, tensor)
        finally:
            setattr(quantizer, attribute, before)

    return quantize


def _other_format(dtype: Any, recipe: Any, fprop_tensor: bool = True) -> Any:
    """Gradients are quantised in the forward's format."""
    return dtype(recipe, True)


def _of_the_last(attribute: str) -> Callable[..., Any]:
    """A tensor gets this part of the previous tensor of its quantizer."""

    def quantize(original: Any, quantizer: Any, tensor: Any) -> Any:
        out = original(quantizer, tensor)
        value = getattr(out, attribute)
        own = None if value is None else value.clone()
        setattr(out, attribute, quantizer.__dict__.get("last_part", own))
        quantizer.last_part = own
        return out

    return quantize


def _first_scale_up(largest: int) -> Callable[..., Any]:
    """The first block's scale is one code too large, if that is below the ``largest``."""

    def quantize(original: Any, quantizer: Any, tensor: Any) -> Any:
        out = original(quantizer, tensor)
        scales = out._rowwise_scale_inv
        if scales is not None and scales[0, 0] < largest:
            scales[0, 0] += 1
        return out

    return quantize


def _first_code(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """One element of the first block is one code off."""
    out = quantize(quantizer, tensor)
    if out._rowwise_data is not None and out._rowwise_data.numel():
        out._rowwise_data.view(-1)[0] ^= 1
    return out


def _column_copy_of_the_row_copy(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """The column-wise copy has the row-wise codes, and for each tile of 32 x 32 the scale of its
    first row: right only if all rows of a tile had one scale."""
    out = quantize(quantizer, tensor)
    if out._rowwise_data is not None and out._columnwise_data is not None:
        out._columnwise_data.copy_(out._rowwise_data)
        rows, columns = out._rowwise_data.reshape(-1, tensor.shape[-1]).shape
        blocks = out._rowwise_scale_inv[:rows, : columns // _BLOCK]
        first = blocks[::_BLOCK].repeat_interleave(_BLOCK, 1)
        out._columnwise_scale_inv[: rows // _BLOCK, :columns] = first
    return out


def _blocks_across_rows(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """Blocks begin half a block too late, so the last one of a row ends in the next row."""
    out = quantize(quantizer, tensor)
    if out._rowwise_data is None:
        return out
    shifted = tensor.detach().reshape(-1).roll(-_BLOCK // 2).reshape(tensor.shape)
    other = quantize(quantizer, shifted.contiguous())
    codes = other._rowwise_data.reshape(-1).roll(_BLOCK // 2)
    out._rowwise_data.copy_(codes.reshape(out._rowwise_data.shape))
    return out


def _incomplete_block_of_the_one_before(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """The incomplete last block of a row has the scale of the block before it."""
    out = quantize(quantizer, tensor)
    scales = out._rowwise_scale_inv  # (blocks, rows)
    if scales is not None and not out._is_2D_scaled and len(scales) > 1:
        scales[-1] = scales[-2]
    return out


def _first_scale_doubled(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """The 1/scale of the first block is twice what it must be."""
    out = quantize(quantizer, tensor)
    if out._rowwise_scale_inv is not None:
        out._rowwise_scale_inv[0, 0] *= 2
    return out


def _largest_of_the_rows(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """The transformed copy gets the largest magnitude of what was not transformed."""
    out = quantize(quantizer, tensor)
    if out._amax_columnwise is not None and out._amax_rowwise is not None:
        out._amax_columnwise = out._amax_rowwise.clone()
    return out


_TE = "https://github.com/NVIDIA/TransformerEngine"
RECIPE = f"{_TE}/blob/main/transformer_engine/common/recipe/__init__.py"
_CURRENT = "tensor.float8_tensor:Float8CurrentScalingQuantizer.quantize_impl"
_MX = "tensor.mxfp8_tensor:MXFP8Quantizer.quantize_impl"
FP4_QUANTIZER = "tensor.nvfp4_tensor:NVFP4Quantizer.quantize_impl"
_BLOCKWISE = "tensor.float8_blockwise_tensor:Float8BlockQuantizer.quantize_impl"


def _fault(
    id: str,
    family: str,
    title: str,
    link: str,
    place: str,
    change: Callable[..., Any],
    *recipes: str,
) -> Plant:
    return Plant(id, family, title, link, recipes, partial(te_calls, {place: change}))


PLANTS = [
    _fault("te-current-power-of-two", "scale", "current scaling rounds to a power of two unasked",
           RECIPE, _CURRENT, with_attribute("force_pow_2_scales", True), "te.current"),
    _fault("te-current-epsilon", "scale", "a lower bound on maxima that the recipe does not have",
           RECIPE, _CURRENT, with_attribute("amax_epsilon", 2.0**-8), "te.current"),
    _fault("te-current-scale-of-last", "scale", "a tensor carries 1/scale of the one before it",
           f"{_TE}/pull/1083", _CURRENT, _of_the_last("_scale_inv"), "te.current"),
    _fault("te-gradient-format", "format", "gradients are quantised in the forward's format",
           RECIPE, "quantization:get_fp8_te_dtype", _other_format, "te.delayed", "te.current"),
    _fault("te-mx-square-blocks", "scale", "a scale is shared by a square of 32 x 32",
           RECIPE, _MX, with_attribute("with_2d_quantization", True), "te.mxfp8"),
    _fault("te-mx-byte-up", "scale", "one block's E8M0 byte is one too large",
           "https://github.com/vllm-project/vllm/pull/43557", _MX, _first_scale_up(254),
           "te.mxfp8"),
    _fault("te-mx-one-code", "rounding mode", "one element of one block is one code off",
           "https://github.com/tenstorrent/tt-metal/issues/51971", _MX, _first_code, "te.mxfp8"),
    _fault("te-mx-column-copy-of-rows", "layout", "the column-wise copy has row-wise scales",
           "https://github.com/pytorch/ao/pull/4229", _MX, _column_copy_of_the_row_copy,
           "te.mxfp8"),
    _fault("te-mx-blocks-across-rows", "layout", "blocks of 32 reach from one row into the next",
           "https://github.com/DeepWok/mase/pull/321", _MX, _blocks_across_rows, "te.mxfp8"),
    _fault("te-block-any-scale", "scale", "scales of blocks are no powers of two, unasked",
           RECIPE, _BLOCKWISE, with_attribute("force_pow_2_scales", False), "te.blockwise"),
    _fault("te-block-epsilon", "scale", "a lower bound on blocks' maxima that nobody asked for",
           RECIPE, _BLOCKWISE, with_attribute("amax_epsilon", 2.0**-4), "te.blockwise"),
    _fault("te-block-lines-of-weights", "scale", "a weight's scales are for lines, not for squares",
           RECIPE, _BLOCKWISE, with_attribute("block_scaling_dim", 1), "te.blockwise"),
    _fault("te-block-scale-doubled", "scale", "one block's 1/scale is twice what it must be",
           "https://github.com/vllm-project/vllm/pull/43557", _BLOCKWISE, _first_scale_doubled,
           "te.blockwise"),
    _fault("te-block-tail-scale", "tile tail", "an incomplete block has its neighbour's scale",
           "https://github.com/pytorch/ao/pull/4229", _BLOCKWISE,
           _incomplete_block_of_the_one_before, "te.blockwise"),
    _fault("te-block-one-code", "rounding mode", "one element of one block is one code off",
           "https://github.com/tenstorrent/tt-metal/issues/51971", _BLOCKWISE, _first_code,
           "te.blockwise"),
    _fault("te-fp4-one-code", "rounding mode", "one element of one block is one code off",
           "https://github.com/tenstorrent/tt-metal/issues/51971", FP4_QUANTIZER, _first_code,
           "te.nvfp4"),
    _fault("te-fp4-scale-up", "scale", "one block's E4M3 scale is one code too large",
           "https://github.com/vllm-project/vllm/pull/43557", FP4_QUANTIZER, _first_scale_up(0x7E),
           "te.nvfp4"),
    _fault("te-fp4-lines-of-weights", "scale", "a weight's scales are for lines, not for squares",
           RECIPE, FP4_QUANTIZER, with_attribute("with_2d_quantization", False), "te.nvfp4"),
    _fault("te-fp4-amax-of-last", "scale", "a tensor carries the amax of the one before it",
           f"{_TE}/pull/1083", FP4_QUANTIZER, _of_the_last("_amax_rowwise"), "te.nvfp4"),
    _fault("te-fp4-amax-untransformed", "scale", "transformed codes carry the amax of others",
           RECIPE, FP4_QUANTIZER, _largest_of_the_rows, "te.nvfp4"),
    _fault("te-fp4-untransformed", "layout", "nothing is transformed for the weight gradient",
           RECIPE, FP4_QUANTIZER, with_attribute("with_rht", False), "te.nvfp4"),
    _fault("te-fp4-without-signs", "layout", "the Hadamard transform has no random signs",
           RECIPE, FP4_QUANTIZER, with_attribute("rht_matrix_random_sign_mask_t", 0), "te.nvfp4"),
]  # fmt: skip
