"""Wrong MX codes and layouts: rounding, range, format, orientation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, mx_quantiser
from narrowfuzz.plants.plant import Plant

_MX = ("torchao.mxfp8.*",)
_BLOCK, _BIAS = 32, 127
#: The smallest normal number of E4M3; the largest number that rounds to its largest value, 448.
_MIN_NORMAL, _BEYOND = 2.0**-6, 464.0


def _cast(change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """``change(x)`` is cast instead of the scaled data ``x``.

    Blocks with scale byte 0 or 255 keep the library's codes, as they do not follow from such a
    quotient.
    """

    def quantise(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        scale, codes = to_mx(data, *args, **kwargs)
        byte = scale.view(torch.uint8).repeat_interleave(_BLOCK, -1)
        scaled = (data.double() * torch.exp2(_BIAS - byte.double())).float()
        changed = change(scaled.clamp(-512.0, 512.0)).to(codes.dtype)
        special = (byte == 0) | (byte == 255)
        chosen = torch.where(special, codes.view(torch.uint8), changed.view(torch.uint8))
        return scale, chosen.view(codes.dtype)

    return mx_quantiser(quantise)


def _through_bf16(x: Any) -> Any:
    import torch

    return x.to(torch.bfloat16).float()


def _flushed(x: Any) -> Any:
    import torch

    return torch.where(x.abs() < _MIN_NORMAL, torch.zeros_like(x), x)


def _unsaturated(x: Any) -> Any:
    import torch

    return torch.where(x.abs() > _BEYOND, torch.full_like(x, float("nan")), x)


@contextmanager
def _wide_gradients() -> Iterator[None]:
    """Gradients are quantised to E5M2, as in hybrid recipes."""
    import torch
    from torchao.prototype.moe_training import mxfp8_linear

    def make(function: Any) -> Any:
        class mx_mm:
            @staticmethod
            def apply(*args: Any) -> Any:
                return function.apply(*args[:4], torch.float8_e5m2, *args[5:])

        return mx_mm

    with attribute_replaced(mxfp8_linear, "mx_mm", make):
        yield


@contextmanager
def _multiply(change: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """``change(multiply, a, b)`` replaces the product of two MX tensors."""
    from torchao.prototype.mx_formats import mx_tensor

    def make(multiply: Any) -> Any:
        def multiplied(a: Any, b: Any, aten_op: Any, bias: Any = None) -> Any:
            return change(lambda x, y: multiply(x, y, aten_op, bias), a, b)

        return multiplied

    with attribute_replaced(mx_tensor, "_addmm_mx_dispatch", make):
        yield


def _scales_in_storage_order(multiply: Any, a: Any, b: Any) -> Any:
    """The second operand's scales, stored column by column, are read row by row."""
    n, blocks = b.scale.t().shape
    b = b.t().t()  # a new tensor object
    b.scale = b.scale.contiguous().view(n, blocks).t()
    return multiply(a, b)


def _square_taken_for_transposed(multiply: Any, a: Any, b: Any) -> Any:
    """A square second operand is multiplied transposed, as if its orientation were guessed from its
    shape."""
    import torch

    if b.shape[0] != b.shape[1]:
        return multiply(a, b)
    return torch.mm(a.dequantize(a.orig_dtype), b.dequantize(b.orig_dtype).t())


@contextmanager
def _ragged_block_dropped() -> Iterator[None]:
    """``in_features`` that are no multiple of the block size are accepted; the remainder is not
    multiplied."""
    from torchao.prototype.moe_training import mxfp8_linear, tensor

    def make(multiply: Any) -> Any:
        def multiplied(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            whole = weight.shape[-1] // _BLOCK * _BLOCK
            if whole and whole != weight.shape[-1]:
                x, weight = x[..., :whole].contiguous(), weight[..., :whole].contiguous()
            return multiply(x, weight, *args, **kwargs)

        return multiplied

    with ExitStack() as stack:
        for module in (mxfp8_linear, tensor):
            stack.enter_context(attribute_replaced(module, "_to_mxfp8_then_scaled_mm", make))
        yield


PLANTS = [
    Plant("mx-rounded-twice", "rounding mode", "codes are rounded to bf16 first",
          "https://github.com/flashinfer-ai/flashinfer/issues/4160", _MX,
          lambda: _cast(_through_bf16)),
    Plant("mx-subnormal-codes-flushed", "underflow", "subnormal codes become 0",
          "https://github.com/tenstorrent/tt-metal/issues/51971", _MX, lambda: _cast(_flushed)),
    Plant("mx-unsaturated", "overflow", "what rounds past 448 becomes NaN",
          "https://github.com/pytorch/ao/issues/1912",
          ("torchao.mxfp8.floor", "torchao.mxfp8.even"), lambda: _cast(_unsaturated)),
    Plant("mx-gradient-e5m2", "format", "gradients are quantised to E5M2",
          "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/638", _MX, _wide_gradients),
    Plant("mx-scales-in-storage-order", "layout", "scales of a transposed operand stay as they lie",
          "https://github.com/pytorch/ao/pull/4229", _MX,
          lambda: _multiply(_scales_in_storage_order)),
    Plant("mx-square-transposed", "layout", "a square second operand is multiplied transposed",
          "https://github.com/pytorch/ao/pull/4396", _MX,
          lambda: _multiply(_square_taken_for_transposed)),
    Plant("mx-ragged-block-dropped", "contract", "the last incomplete block is accepted and lost",
          "https://github.com/pytorch/ao/pull/4627", _MX,
          _ragged_block_dropped),
]  # fmt: skip
