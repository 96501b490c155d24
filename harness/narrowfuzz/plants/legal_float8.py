"""torchao's float8 linears, computed in other legal ways: products, scales, casts, cached
weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.machine.policy import cast_policies
from narrowfuzz.plants import sums
from narrowfuzz.plants.patching import attribute_replaced, float8_products, recompiled
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)
_POWERS = ("torchao.float8.rowwise", "torchao.float8.rowwise_gw_hp")
_EAGER = ("eager*",)
_PAD = 16


def _holding(operand: Any, data: Any) -> Any:
    """The float8 operand with its codes replaced by ``data``."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    return Float8TrainingTensor(
        data,
        operand._scale,
        operand._orig_dtype,
        operand._linear_mm_config,
        operand._gemm_input_role,
        operand._axiswise_dim,
    )


def _bytes(operand: Any, change: Callable[[Any], Any]) -> Any:
    """The operand after ``change`` of its codes, as bytes since float8 dtypes have few
    operators."""
    import torch

    data = operand._data
    return _holding(operand, change(data.view(torch.uint8)).view(data.dtype))


def _reversed(multiply: Any, a: Any, b: Any, role: str) -> Any:
    return multiply(_bytes(a, lambda d: d.flip(1)), _bytes(b, lambda d: d.flip(0)))


def _padded(multiply: Any, a: Any, b: Any, role: str) -> Any:
    from torch.nn.functional import pad

    wider = _bytes(a, lambda d: pad(d, (0, _PAD)))
    return multiply(wider, _bytes(b, lambda d: pad(d, (0, 0, 0, _PAD))))


def _copied(multiply: Any, a: Any, b: Any, role: str) -> Any:
    return multiply(_bytes(a, lambda d: d.contiguous().clone()), _bytes(b, lambda d: d.clone()))


def _twice(multiply: Any, a: Any, b: Any, role: str) -> Any:
    multiply(a, b)
    return multiply(a, b)


def _emulated(product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Where torchao emulates (it multiplies fp32 operands and rounds once): ``product`` in place of
    that multiply."""

    def change(multiply: Any, a: Any, b: Any, role: str) -> Any:
        if not a._linear_mm_config.output.emulate:
            return multiply(a, b)
        out = product(a._data.float() / a._scale, b._data.float() / b._scale)
        return out.to(a._orig_dtype)

    return change


def _chunked_amax(original: Any) -> Any:
    """The amax as the maximum of the maxima of parts."""
    import torch
    from torchao.float8.config import ScalingGranularity

    def amax(
        x: Any,
        reduce_amax: Any = False,
        device_mesh: Any = None,
        scaling_granularity: Any = ScalingGranularity.TENSORWISE,
        axiswise_dim: Any = None,
    ) -> Any:
        if not x.numel():
            return original(x, reduce_amax, device_mesh, scaling_granularity, axiswise_dim)
        if scaling_granularity is ScalingGranularity.TENSORWISE:
            flat = x.reshape(-1)
            parts = [part.abs().max() for part in flat.split(1 + len(flat) // 5)]
        else:
            length = 1 + x.shape[axiswise_dim] // 5
            parts = [
                part.abs().amax(axiswise_dim, keepdim=True)
                for part in x.split(length, axiswise_dim)
            ]
        return functools.reduce(torch.maximum, parts)

    return amax


def _scale_by_fp32(original: Any) -> Any:
    """fmax / amax divided in fp32. It is correctly rounded, and so is the fp64 quotient rounded to
    fp32, so the two are equal."""
    import torch
    from torchao.float8 import float8_utils

    def to_scale(amax: Any, dtype: Any, round_scales_to_power_of_2: bool = False) -> Any:
        usual = original(amax, dtype, round_scales_to_power_of_2)
        largest = torch.full_like(amax, torch.finfo(dtype).max, dtype=torch.float32)
        quotient = largest / amax.float()
        if round_scales_to_power_of_2:
            quotient = float8_utils._round_scale_down_to_power_of_2(quotient)
        return torch.where(amax.double() < float8_utils.EPS, usual, quotient)

    return to_scale


def _power_by_bits(original: Any) -> Any:
    """The power of two at or below a scale, made from its exponent bits."""
    import torch

    def down(scale: Any) -> Any:
        power = (scale.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
        return torch.where(scale.isnan(), scale, power)

    return down


def _cast_by_selection(original: Any) -> Any:
    """Saturation as a choice between two values instead of a clamp."""
    import torch

    def cast(x: Any, dtype: Any) -> Any:
        largest = torch.full_like(x, torch.finfo(dtype).max)
        return torch.where(x.abs() > largest, largest.copysign(x), x).to(dtype)

    return cast


def _cast_by_policy(original: Any) -> Any:
    """No clamp where the cast of the installed torch saturates by itself."""
    import torch

    policies = cast_policies()
    kinds = ("finite overflow", "inf")
    saturates = all(policies[f"e4m3fn {kind}"] == "saturates to 448" for kind in kinds)

    def cast(x: Any, dtype: Any) -> Any:
        if saturates and dtype == torch.float8_e4m3fn:
            return x.to(dtype)
        return original(x, dtype)

    return cast


def _scaled_in_bf16(original: Any) -> Any:
    """bf16 data times a power of two, computed in bf16: exact, or far below the smallest code."""
    import torch
    from torchao.float8 import float8_training_tensor as held

    def quantise(
        x: Any, scale: Any, dtype: Any, config: Any = None, role: Any = None, axis: Any = None
    ) -> Any:
        if x.dtype != torch.bfloat16:
            return original(x, scale, dtype, config, role, axis)
        codes = held.to_fp8_saturated((x * scale.to(x.dtype)).float(), dtype)
        return held.Float8TrainingTensor(codes, scale, x.dtype, config, role, axis)

    return quantise


class _CastCache:
    """Cached casts of weights; a weight is cast again only when its values have changed. (Whether
    its version has does not tell: fused optimizer steps do not count it up.)"""

    def __init__(self) -> None:
        self.casts: dict[tuple[Any, ...], Any] = {}

    def __call__(self, original: Any) -> Any:
        from torchao.float8 import float8_utils

        from narrowfuzz.arms.tensors import fp32_array

        def quantise(x: Any, dtype: Any, config: Any, **how: Any) -> Any:
            if how["gemm_input_role"].value != "weight" or x.is_inference():
                return original(x, dtype, config, **how)
            key = (
                fp32_array(x).tobytes(),
                x.shape,
                x.stride(),
                x.dtype,
                dtype,
                config,
                *map(str, how.items()),
            )
            found = self.casts.get(key)
            if found is not None:
                granularity, axis = how["scaling_granularity"], how["axiswise_dim"]
                # repeated for observers of the amax
                float8_utils.tensor_to_amax(x, False, None, granularity, axis)
                return found
            made = original(x, dtype, config, **how)
            if len(self.casts) > 64:
                self.casts.clear()
            self.casts[key] = made
            return made

        return quantise


@contextmanager
def _products(change: Callable[..., Any]) -> Iterator[None]:
    with recompiled(), float8_products(change):
        yield


@contextmanager
def _in(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    import importlib

    with (
        recompiled(),
        attribute_replaced(importlib.import_module(f"torchao.float8.{module}"), name, make),
    ):
        yield


def _utils(name: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: _in("float8_utils", name, make)


def _cast(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: _in("float8_training_tensor", "to_fp8_saturated", make)


_EXACT_MAX = "a maximum is exact in any order: docs/rules.md, O4"
_FLOOR = "O3 asks for the largest power of two at or below fmax / amax: docs/rules.md"
_legal = functools.partial(Plant, legal=True, arms=_EAGER)

PLANTS = [
    _legal("float8-reversed-sums", "sums", "K from the last to the first, on both backends",
           sums.ANY_ORDER, _FLOAT8, lambda: _products(_reversed)),
    _legal("float8-blocked-sums", "sums", "emulated: partial sums of 16 products", sums.ANY_ORDER,
           _FLOAT8, lambda: _products(_emulated(sums.blocked))),
    _legal("float8-float64-sums", "sums", "emulated: fp64 accumulators",
           sums.WIDER, _FLOAT8,
           lambda: _products(_emulated(sums.wide))),
    _legal("float8-exchanged-products", "sums", "emulated: a b as the transpose of b' a'",
           sums.ANY_ORDER, _FLOAT8, lambda: _products(_emulated(sums.exchanged))),
    _legal("float8-padded-sums", "sums", "16 zeros more to sum",
           "zeros add nothing: docs/rules.md, R8", _FLOAT8, lambda: _products(_padded)),
    _legal("float8-copied-operands", "copies", "operands copied before every multiply",
           "a copy holds the same values: docs/rules.md, R16", _FLOAT8, lambda: _products(_copied)),
    _legal("float8-everything-twice", "repeats", "every multiply runs twice",
           "the same operands give the same bits: docs/rules.md, O1", _FLOAT8,
           lambda: _products(_twice)),
    _legal("float8-amax-in-parts", "amax", "maxima of parts, then their maximum", _EXACT_MAX,
           _FLOAT8, _utils("tensor_to_amax", _chunked_amax)),
    _legal("float8-amax-in-parts-traced", "amax", "the same in traced and partitioned graphs",
           _EXACT_MAX, _FLOAT8, _utils("tensor_to_amax", _chunked_amax), models=("linear",),
           arms=("aot_eager*",)),
    _legal("float8-scale-in-fp32", "scale", "the scale divided in fp32",
           "fp64 has more than twice fp32's digits and two: rounding the quotient twice is "
           "rounding it once (S. Figueroa, When is double rounding innocuous?, 1995)",
           ("torchao.float8.tensorwise",), _utils("amax_to_scale", _scale_by_fp32)),
    _legal("float8-power-by-bits", "scale", "a scale's power of two from its exponent bits", _FLOOR,
           _POWERS, _utils("_round_scale_down_to_power_of_2", _power_by_bits)),
    _legal("float8-power-by-bits-traced", "scale", "the same in traced graphs", _FLOOR, _POWERS,
           _utils("_round_scale_down_to_power_of_2", _power_by_bits), models=("linear",),
           arms=("aot_eager*",)),
    _legal("float8-cast-by-selection", "casts", "saturation as a choice of two values",
           "OFP8 saturates Inf and finite overflow, NaN stays: docs/rules.md, O2", _FLOAT8,
           _cast(_cast_by_selection)),
    _legal("float8-cast-by-policy", "casts", "no clamp where torch's own cast saturates",
           "the probed cast policy: docs/rules.md, Policies", _FLOAT8, _cast(_cast_by_policy)),
    _legal("float8-scaled-in-bf16", "casts", "bf16 data times a power of two, in bf16",
           "a power of two moves no digit: the second rounding has nothing to round", _POWERS,
           lambda: _in("float8_scaling_utils", "hp_tensor_and_scale_to_float8", _scaled_in_bf16)),
    _legal("float8-kept-weights", "copies", "a weight is cast once while its values are the same",
           "equal data gives equal codes and scales: docs/rules.md, O2, O3", _FLOAT8,
           lambda: _in("float8_linear", "hp_tensor_to_float8_dynamic", _CastCache())),
]  # fmt: skip
