"""Faults in the quantisation of torchao's MXFP8 grouped products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from narrowfuzz.models.operators import OPERATORS
from narrowfuzz.plants.operators import of_operator
from narrowfuzz.plants.patching import attribute_replaced


def _changed(name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(original, *args)`` replaces this function of ``mxfp8_grouped_mm``."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: change(original, *args, **kwargs)

    return attribute_replaced(mxfp8_grouped_mm, name, make)


def _scales_of_first(original: Any, tensor: Any, block: int, mode: Any) -> Any:
    """Every expert's codes are made with its own scales but multiplied by the first expert's."""
    codes, scales = original(tensor, block, mode)
    return codes, scales[:1].expand_as(scales) if tensor.ndim == 3 else scales


def _quantised_twice(original: Any, x: Any, block: int, mode: Any) -> Any:
    """Backward quantises the dequantised weight of the forward, not the weight itself."""
    import torch
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _extract_or_quantize_1x32_emulated
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    codes, scales = _extract_or_quantize_1x32_emulated(x.contiguous(), block, mode)
    again = to_dtype(codes, scales, torch.float8_e4m3fn, block, x.dtype)
    return original(again, block, mode)


def _without_last_block(original: Any, a: Any, a_scale: Any, *rest: Any, **how: Any) -> Any:
    """The last block of tokens in the weight gradient has the scale of the block before."""
    if a_scale.shape[1] > 1:
        a_scale = a_scale.clone()
        a_scale[:, -1] = a_scale[:, -2]
    return original(a, a_scale, *rest, **how)


def _first_rows(original: Any, padded: Any, ends: Any, starts: Any, tokens: int, **how: Any) -> Any:
    """What padding has moved is not moved back: the first rows, padding included, are returned."""
    return padded[:tokens]


_OPERATOR = "mxfp8_grouped_mm"
PLANTS = [
    of_operator(
        f"mx-groups-{id}",
        "experts",
        title,
        source,
        partial(_changed, name, change),
        operator=_OPERATOR,
    )
    for id, title, source, name, change in (
        (
            "scales-of-first-expert",
            "weights of all experts are multiplied by the scales of the first",
            "the class of https://github.com/huggingface/kernels-community/issues/1153",
            "_extract_or_quantize_1x32_emulated",
            _scales_of_first,
        ),
        (
            "weight-quantised-twice",
            "the input gradient is of weights that the forward had quantised already",
            "the class of casts from a cache",
            "_quantize_3d_along_dim1_native",
            _quantised_twice,
        ),
        (
            "gradient-scale-of-block-before",
            "the last block of tokens in a weight gradient has the scale of the block before",
            "the class of scales that are read a block off",
            "_emulated_mxfp8_scaled_grouped_mm_2d_2d",
            _without_last_block,
        ),
        (
            "padding-returned",
            "results of padded groups begin where they would without padding",
            "the class of https://github.com/pytorch/torchtitan/issues/1237: padding among tokens",
            "unpad_token_groups",
            _first_rows,
        ),
    )
    if any(_OPERATOR in (model.operators or ()) for model in OPERATORS)  # torchao is there
]
