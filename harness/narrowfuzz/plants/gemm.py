"""Wrong multiplies: gains, lost elements, narrow sums, overflow, nondeterminism."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, float8_forward, float8_mm
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)


def _gain(a: Any, b: Any, result: Any, role: str) -> Any:
    return result * 1.03 if role == "output" else result


def _lost_element(a: Any, b: Any, result: Any, role: str) -> Any:
    if role == "grad_weight" and result.numel():
        result = result.clone()
        result[-1, -1] = 0
    return result


def _split_sum(a: Any, b: Any, result: Any, role: str) -> Any:
    """The two halves of the contraction are rounded to bf16 before they are added."""
    import torch

    half = a._data.shape[1] // 2
    x, y = a._data.float() / a._scale, b._data.float() / b._scale
    first = (x[:, :half] @ y[:half]).to(torch.bfloat16)
    return (first + (x[:, half:] @ y[half:]).to(torch.bfloat16)).to(result.dtype)


def _overflow(a: Any, b: Any, result: Any, role: str) -> Any:
    import torch

    return torch.where(result.abs() > 2.0, result * float("inf"), result)


def _by_chance() -> Any:
    """Every other multiply has a relative error of 2^-6 in one element: a race, made repeatable."""
    calls = itertools.count()

    def change(a: Any, b: Any, result: Any, role: str) -> Any:
        if next(calls) % 2 and result.numel():
            result = result.clone()
            result[0, 0] *= 1.0 + 2.0**-6
        return result

    return float8_mm(change)


@contextmanager
def _unwritten(rows: Callable[[Any, Any], int]) -> Iterator[None]:
    """The first ``rows(a, result)`` rows of scaled_mm's result are never written."""
    import torch
    from torch.nn import functional

    def make(original: Any) -> Any:
        def multiply(a: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(a, *args, **kwargs)
            memory, count = torch.empty_like(result), rows(a, result)
            memory[count:] = result[count:]
            return memory

        return multiply

    with attribute_replaced(functional, "scaled_mm", make):
        yield


@contextmanager
def _narrow_without_onednn() -> Iterator[None]:
    """If oneDNN is off, partial sums of eight products are added up in bf16."""
    import torch
    from torch.nn import functional

    def make(linear: Any) -> Any:
        def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
            if torch._C._get_mkldnn_enabled() or x.dtype is not torch.bfloat16:
                return linear(x, weight, bias)
            parts = zip(x.split(8, -1), weight.split(8, -1), strict=True)
            result = sum(linear(a, b) for a, b in parts)
            return result if bias is None else result + bias

        return multiply

    with attribute_replaced(functional, "linear", make):
        yield


def _gained_layer(forward: Any, layer: Any, input: Any) -> Any:
    return forward(layer, input) * 1.5


def _batched(forward: Any, layer: Any, input: Any) -> Any:
    output = forward(layer, input)
    return output * (1.0 + 2.0**-5) if input.dim() == 3 else output


def _bias_without_last_row(forward: Any, layer: Any, input: Any) -> Any:
    """The last token is missing from the gradient of the bias; the output is right."""
    import torch

    bias, layer.bias = layer.bias, None
    try:
        output = forward(layer, input)
    finally:
        layer.bias = bias
    if bias is None:
        return output
    added = bias.to(output.dtype)
    rows = torch.arange(output.shape[-2], device=output.device)
    last = rows == output.shape[-2] - 1
    return output + torch.where(last[:, None], added.detach(), added)


PLANTS = [
    Plant("gemm-gain", "gain", "output 3 % too large",
          "https://github.com/ROCm/rocm-libraries/pull/11003", _FLOAT8, lambda: float8_mm(_gain)),
    Plant("gemm-loses-element", "tile tail", "the last element of grad_weight is never written",
          "https://github.com/pytorch/pytorch/issues/193633", _FLOAT8,
          lambda: float8_mm(_lost_element)),
    Plant("gemm-narrow-accumulator", "accumulator", "two half sums meet in bf16",
          "https://github.com/deepseek-ai/DeepSeek-V3/issues/197", _FLOAT8,
          lambda: float8_mm(_split_sum)),
    Plant("gemm-overflows", "overflow", "results above 2 become Inf",
          "https://github.com/pytorch/pytorch/pull/177769", _FLOAT8,
          lambda: float8_mm(_overflow)),
    Plant("gemm-races", "nondeterminism", "one element of every other multiply is off",
          "https://github.com/pytorch/ao/pull/4278", _FLOAT8, _by_chance),
    Plant("empty-gemm-unwritten", "tile tail", "with nothing to contract the result is old memory",
          "torch 2.13.0 torch._scaled_mm on a CPU", ("torch.scaled_mm",),
          lambda: _unwritten(lambda a, result: 0 if a.shape[1] else len(result))),
    Plant("gemm-rows-unwritten", "tile tail", "half of the result's rows are old memory",
          "https://github.com/pytorch/pytorch/issues/193633", ("torch.scaled_mm",),
          lambda: _unwritten(lambda a, result: len(result) // 2)),
    Plant("gemm-narrow-without-onednn", "accumulator", "PyTorch's own kernel sums in bf16",
          "https://github.com/pytorch/pytorch/issues/83863", ("torch.bf16",),
          _narrow_without_onednn),
    Plant("layer-gain", "gain", "layer output 50 % too large",
          "https://github.com/pytorch/pytorch/issues/190449", _FLOAT8,
          lambda: float8_forward(_gained_layer)),
    Plant("batched-gain", "layout", "3-D inputs give another output",
          "https://github.com/pytorch/ao/pull/4396", _FLOAT8, lambda: float8_forward(_batched)),
    Plant("bias-gradient-loses-row", "tile tail", "the last token is not in the bias gradient",
          "https://github.com/NVIDIA/TransformerEngine/pull/3344", _FLOAT8,
          lambda: float8_forward(_bias_without_last_row)),
]  # fmt: skip
