"""torchao's MXFP8 linears, computed in other legal ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from narrowfuzz.plants import sums
from narrowfuzz.plants.patching import mx_products, mx_quantiser
from narrowfuzz.plants.plant import Plant

_MX = ("torchao.mxfp8.*",)
_EAGER = ("eager*",)
_BLOCK = 32
_BIAS, _NAN_BYTE = 127, 255


def _summed(product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """fp32 sums of the dequantised operands in another order, rounded once."""

    def change(multiply: Any, a: Any, b: Any, op: Any, bias: Any = None) -> Any:
        if bias is not None:
            return multiply(a, b, op, bias)
        dtype = a.orig_dtype
        return product(a.dequantize(dtype).float(), b.dequantize(dtype).float()).to(dtype)

    return change


def _block_by_block(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Every block of 32 elements is quantised by itself."""
    import torch

    if not data.shape[-1] or data.shape[-1] % _BLOCK or not data.is_contiguous():
        return to_mx(data, *args, **kwargs)
    made = [to_mx(part.contiguous(), *args, **kwargs) for part in data.split(_BLOCK, -1)]
    scales, codes = (
        torch.cat([t.view(torch.uint8) for t in parts], -1).view(parts[0].dtype)
        for parts in zip(*made, strict=True)
    )
    return scales, codes


def _twice(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    to_mx(data, *args, **kwargs)
    return to_mx(data.clone(), *args, **kwargs)


def _by_arithmetic(
    to_mx: Any, data: Any, dtype: Any, block: int, mode: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Scale bytes from frexp in fp64, elements divided in fp64, saturated, rounded once.

    A block with an Inf gets the scale byte of the library, as OCP MX does not define it.
    """
    import torch

    mode = kwargs.pop("scaling_mode", mode)
    # called first so that it raises on unsupported arguments
    theirs, _ = to_mx(data, dtype, block, mode, *args, **kwargs)
    blocks = data.double().reshape(*data.shape[:-1], data.shape[-1] // block, block)
    amax = blocks.abs().amax(-1)
    finite = amax.isfinite() & (amax > 0)
    half, exponent = torch.frexp(torch.where(finite, amax, torch.ones_like(amax)))
    significand, power = 2.0 * half, exponent - 1
    if mode.value == "even":
        significand = (significand * 8.0 + 0.5).floor() / 8.0
        power = power + (significand >= 2.0)
    up = {"rceil": significand > 1.75, "ceil": significand > 1.0}.get(
        mode.value, torch.zeros_like(finite)
    )
    byte = (power - 8 + up.int() + _BIAS).clamp(0, 254)
    byte = torch.where(amax == 0, torch.zeros_like(byte), byte)
    byte = torch.where(amax.isnan(), torch.full_like(byte, _NAN_BYTE), byte).to(torch.uint8)
    byte = torch.where(amax.isinf(), theirs.view(torch.uint8), byte)
    unit = torch.exp2(byte.double() - _BIAS)
    unit = torch.where(byte == _NAN_BYTE, torch.full_like(unit, float("nan")), unit)
    codes = (blocks / unit.unsqueeze(-1)).clamp(-448.0, 448.0).float().to(dtype)
    return byte.view(torch.float8_e8m0fnu), codes.reshape(data.shape)


_OCP = (
    "OCP MX v1.0, section 6.3: the scale is a power of two by the block's amax, elements past the "
    "largest are clamped (so FLOOR saturates where amax / X is above 448)"
)
_legal = partial(Plant, legal=True, arms=_EAGER)

PLANTS = [
    _legal("mx-reversed-sums", "sums", "K from the last to the first", sums.ANY_ORDER, _MX,
           lambda: mx_products(_summed(sums.reversed_sum))),
    _legal("mx-blocked-sums", "sums", "partial sums of 16 products", sums.ANY_ORDER, _MX,
           lambda: mx_products(_summed(sums.blocked))),
    _legal("mx-block-by-block", "casts", "every block quantised on its own",
           "nothing outside a block changes it: docs/rules.md, R15", _MX,
           lambda: mx_quantiser(_block_by_block)),
    _legal("mx-everything-twice", "repeats",
           "every tensor is quantised twice, the second time from a copy",
           "the same data gives the same bits: docs/rules.md, O1", _MX,
           lambda: mx_quantiser(_twice)),
    _legal("mx-by-arithmetic", "scale", "scale bytes and elements by fp64 arithmetic", _OCP, _MX,
           lambda: mx_quantiser(_by_arithmetic)),
]  # fmt: skip
