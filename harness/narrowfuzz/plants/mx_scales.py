"""Wrong E8M0 scales: confused modes, leaked bits, lost NaN, another block size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, mx_quantiser
from narrowfuzz.plants.plant import Plant

_MX = ("torchao.mxfp8.*",)
_RCEIL = ("torchao.mxfp8.rceil*",)
_NOT_FLOOR = (*_RCEIL, "torchao.mxfp8.ceil", "torchao.mxfp8.even")
_BLOCK, _LARGEST, _BIAS, _NAN = 32, 448.0, 127, 255


def _scaled(data: Any, byte: Any) -> Any:
    """E4M3 codes of ``data`` under these scale bytes, rounded from the exact quotient."""
    import torch

    factor = torch.exp2(_BIAS - byte.double()).repeat_interleave(_BLOCK, -1)
    quotient = (data.double() * factor).float()
    nan = (byte == _NAN).repeat_interleave(_BLOCK, -1)
    quotient = torch.where(nan, float("nan"), quotient.clamp(-_LARGEST, _LARGEST))
    return quotient.to(torch.float8_e4m3fn)


def _amax(data: Any) -> Any:
    return data.float().abs().unflatten(-1, (-1, _BLOCK)).amax(-1)


def _nearest(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Scales are rounded to nearest by the cast to E8M0 instead of up."""
    import torch

    scale = (_amax(data) / _LARGEST).to(torch.float8_e8m0fnu)
    return scale, _scaled(data, scale.view(torch.uint8))


def _leaking(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Four exponents are packed into one word without masking, so that the bits below an exponent
    leak into its neighbour."""
    import torch

    scale, codes = to_mx(data, *args, **kwargs)
    words = (_amax(data) / _LARGEST).view(torch.int32)
    packed = scale.view(torch.uint8).clone()
    below = (words >> 15 & 0xFF).to(torch.uint8)
    for i in range(packed.shape[-1] - 1):
        if i % 4 < 3:  # nothing leaks into the next word
            packed[..., i] |= below[..., i + 1]
    return packed.view(scale.dtype), codes


def _nan_ignored(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """The amax ignores NaN, as a maximum instruction does that returns the operand that is a
    number; the NaN elements keep NaN codes."""
    import torch

    numbers = torch.where(data.isnan(), torch.zeros_like(data), data)
    scale, codes = to_mx(numbers, *args, **kwargs)
    lost = data.isnan()
    nan = torch.full_like(data, float("nan")).to(codes.dtype)
    chosen = torch.where(lost, nan.view(torch.uint8), codes.view(torch.uint8))
    return scale, chosen.view(codes.dtype)


def _blocks_of_64(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Two neighbouring blocks are scaled as one."""
    import torch

    scale, codes = to_mx(data, *args, **kwargs)
    byte = scale.view(torch.uint8)
    if byte.shape[-1] % 2 or not byte.numel():
        return scale, codes
    larger = byte.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)
    return larger.view(scale.dtype), _scaled(data, larger)


@contextmanager
def _mode_dropped() -> Iterator[None]:
    """Backward's column-wise cast does not get the scale mode and uses its default, FLOOR."""
    from torchao.prototype.moe_training import mxfp8_linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    def make(cast: Any) -> Any:
        return lambda *args: cast(*args[:-1], ScaleCalculationMode.FLOOR)

    with attribute_replaced(mxfp8_linear, "_to_mxfp8_dim1_kernel_wrapper", make):
        yield


@contextmanager
def _byte_zero_is_zero() -> Iterator[None]:
    """The scale byte becomes the exponent bits of an fp32, so byte 0 means 0 and not 2^-127."""
    from torchao.prototype.mx_formats import mx_tensor

    def make(expand: Any) -> Any:
        def expanded(scale: Any) -> Any:
            import torch

            factor = expand(scale)
            empty = scale.view(torch.uint8) == 0
            return torch.where(empty, torch.zeros_like(factor), factor)

        return expanded

    with attribute_replaced(mx_tensor, "get_fp_scale", make):
        yield


PLANTS = [
    Plant("mx-scale-to-nearest", "rounding mode", "E8M0 scales are rounded to nearest, not up",
          "https://github.com/ml-explore/mlx/pull/4353", _RCEIL, lambda: mx_quantiser(_nearest)),
    Plant("mx-mode-dropped", "rounding mode", "backward's column-wise casts round as floor does",
          "https://github.com/pytorch/ao/pull/3686", _NOT_FLOOR, _mode_dropped),
    Plant("mx-exponents-leak", "scale", "bits of a neighbour's scale get into an E8M0 byte",
          "https://github.com/NVIDIA/TransformerEngine/pull/2589", _MX,
          lambda: mx_quantiser(_leaking)),
    Plant("mx-byte-zero-is-zero", "scale", "a block with scale byte 0 is erased",
          "https://github.com/NVIDIA/TransformerEngine/pull/3262", _MX, _byte_zero_is_zero),
    Plant("mx-nan-not-in-scale", "amax", "a block's maximum passes over its NaN",
          "https://github.com/pytorch/ao/pull/4652", _MX, lambda: mx_quantiser(_nan_ignored)),
    Plant("mx-blocks-of-64", "granule", "two neighbouring blocks share the larger scale",
          "https://github.com/pytorch/torchtitan/issues/2262", _MX,
          lambda: mx_quantiser(_blocks_of_64)),
]  # fmt: skip
