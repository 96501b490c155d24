"""Results that depend on the layout of data in memory: tails, tiles, strides, transposed copies;
and stale state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import (
    attribute_replaced,
    float8_forward,
    float8_mm,
    float8_operand,
    in_backward,
)
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)


def _last_row(a: Any, b: Any, result: Any, role: str) -> Any:
    """The last row is doubled, as if its scale were read past the end of the scale vector."""
    return _doubled_from(result, 0, result.shape[0] - 1) if role == "output" else result


def _last_column(a: Any, b: Any, result: Any, role: str) -> Any:
    return _doubled_from(result, 1, result.shape[1] - 1) if role == "output" else result


def _ragged_rows(a: Any, b: Any, result: Any, role: str) -> Any:
    """Rows after the last whole tile of 32 are doubled, as if they had another tile's scale."""
    return _doubled_from(result, 0, result.shape[0] // 32 * 32) if role == "output" else result


def _doubled_from(result: Any, dim: int, start: int) -> Any:
    """A copy of the result, doubled from index ``start`` of ``dim`` on."""
    result = result.clone()
    result.narrow(dim, start, result.shape[dim] - start).mul_(2)
    return result


def _dropped_tail(a: Any, b: Any, result: Any, role: str) -> Any:
    """The last element of K never enters the sum."""
    if role != "output" or not a._data.shape[1]:
        return result
    x, y = a._data.float() / a._scale, b._data.float() / b._scale
    return (result.float() - x[:, -1:] @ y[-1:, :]).to(result.dtype)


def _odd_blocks(a: Any, b: Any, result: Any, role: str) -> Any:
    """The output is 25 % too large if K has an odd number of blocks of 32, as if the kernel's
    unrolled loop ran once too often."""
    return result * 1.25 if role == "output" and a._data.shape[1] // 32 % 2 else result


def _ragged_tokens(a: Any, b: Any, result: Any, role: str) -> Any:
    """grad_weight is halved if the number of tokens is no multiple of 32."""
    return result * 0.5 if role == "grad_weight" and a._data.shape[1] % 32 else result


def _storage_order(forward: Any, layer: Any, input: Any) -> Any:
    """A transposed input is read in memory order, as if it were contiguous."""
    import torch

    strides = torch.empty(input.shape, device="meta").stride()
    return forward(layer, input.as_strided(input.shape, strides))


def _weight_storage_order(forward: Any, layer: Any, input: Any) -> Any:
    """A weight whose memory is not contiguous is read as if it were."""
    import torch

    weight = layer.weight.data
    strides = torch.empty(weight.shape, device="meta").stride()
    layer.weight.data = weight.as_strided(weight.shape, strides)
    try:
        return forward(layer, input)
    finally:
        layer.weight.data = weight


def _unfilled_cache(forward: Any, layer: Any, input: Any) -> Any:
    """The output is 0 once the weight has a gradient, as if the weight came from an unfilled
    cache."""
    output = forward(layer, input)
    return output if layer.weight.grad is None else output * 0.0


@contextmanager
def _half_loaded() -> Iterator[None]:
    """A loaded weight is halved, as if a factor that belongs to it had not been loaded."""
    import torch
    from torchao.float8.float8_linear import Float8Linear

    def make(original: Any) -> Any:
        def load(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            with torch.no_grad():
                self.weight.mul_(0.5)

        return load

    with attribute_replaced(Float8Linear, "_load_from_state_dict", make):
        yield


def _dead_columns(x: Any) -> Any:
    """Every fourth column of the copy made for backward holds its neighbour's data."""
    if not in_backward() or x.shape[-1] % 4:
        return x
    x = x.clone()
    x[..., ::4] = x[..., 1::4]
    return x


PLANTS = [
    Plant("row-tail-scale", "tile tail", "the last output row is twice what it should be",
          "https://github.com/pytorch/pytorch/issues/133334", _FLOAT8,
          lambda: float8_mm(_last_row)),
    Plant("column-tail-scale", "tile tail", "the last output column is twice what it should be",
          "https://github.com/pytorch/ao/pull/4229", _FLOAT8, lambda: float8_mm(_last_column)),
    Plant("k-tail-dropped", "tile tail", "the last element of K does not enter the output",
          "https://github.com/pytorch/ao/pull/4186", _FLOAT8, lambda: float8_mm(_dropped_tail)),
    Plant("k-odd-blocks", "tile tail", "output 25 % too large for an odd number of 32-blocks in K",
          "https://github.com/pytorch/pytorch/issues/193802", _FLOAT8,
          lambda: float8_mm(_odd_blocks)),
    Plant("rows-ragged", "tile tail", "output rows behind the last whole tile of 32 are doubled",
          "https://github.com/pytorch/ao/pull/4627", _FLOAT8, lambda: float8_mm(_ragged_rows)),
    Plant("tokens-ragged", "tile tail", "grad_weight is halved unless the tokens fill tiles of 32",
          "https://github.com/NVIDIA/TransformerEngine/pull/3344", _FLOAT8,
          lambda: float8_mm(_ragged_tokens)),
    Plant("strides-ignored", "layout", "a transposed input is read in storage order",
          "https://github.com/pytorch/ao/pull/4038", _FLOAT8,
          lambda: float8_forward(_storage_order)),
    Plant("weight-strides-ignored", "layout", "a weight that is a view is read in storage order",
          "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1187", _FLOAT8,
          lambda: float8_forward(_weight_storage_order)),
    Plant("cache-unfilled", "state", "output 0 while gradients of an earlier step exist",
          "https://github.com/NVIDIA/TransformerEngine/issues/539", _FLOAT8,
          lambda: float8_forward(_unfilled_cache)),
    Plant("state-half-loaded", "state", "a loaded weight is half of what was saved",
          "https://github.com/NVIDIA/TransformerEngine/pull/123", _FLOAT8, _half_loaded),
    Plant("transposed-copy-garbled", "layout", "every fourth column of a transposed copy is wrong",
          "https://github.com/triton-lang/triton/issues/11111", _FLOAT8,
          lambda: float8_operand("input", _dead_columns)),
]  # fmt: skip
