"""Recompute that differs from its forward, and saved statistics that do not match operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, float8_forward, in_backward
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)


def _drifted(forward: Any, layer: Any, input: Any) -> Any:
    """In recompute the layer's input is multiplied by 1 + 1/16."""
    return forward(layer, input * (1.0 + 2.0**-4) if in_backward() else input)


def _unquantised(forward: Any, layer: Any, input: Any) -> Any:
    """Recompute runs in high precision, as backward runs it outside the context that quantises."""
    import torch.nn.functional as F

    return F.linear(input, layer.weight, layer.bias) if in_backward() else forward(layer, input)


@contextmanager
def _moved_keys() -> Iterator[None]:
    """Attention's backward gets every 64th key element one E4M3 step off, so keys and saved
    statistics do not match."""
    import torch
    import torch.nn.functional as F

    aten = torch.ops.aten

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.causal = causal
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            q, k, v, out, lse = ctx.saved_tensors
            moved = k.contiguous().clone()
            moved.view(-1)[::64] *= 1.0 + 2.0**-3  # one step of E4M3
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, moved, v, out, lse, 0.0, ctx.causal
            )
            return *grads, None

    def make(original: Any) -> Any:
        return lambda q, k, v, is_causal=False: Mixed.apply(q, k, v, is_causal)

    with attribute_replaced(F, "scaled_dot_product_attention", make):
        yield


PLANTS = [
    Plant(
        "recompute-drifts",
        "recompute",
        "recompute rounds its input differently",
        "https://github.com/pytorch/pytorch/issues/150859",
        _FLOAT8,
        lambda: float8_forward(_drifted),
    ),
    Plant(
        "recompute-unquantised",
        "recompute",
        "recompute runs in high precision",
        "https://github.com/NVIDIA/TransformerEngine/pull/24",
        _FLOAT8,
        lambda: float8_forward(_unquantised),
    ),
    Plant(
        "attention-keys-move",
        "recompute",
        "attention's keys change scale before its backward",
        "https://github.com/NVIDIA/TransformerEngine/pull/1597",
        ("*",),
        _moved_keys,
        needs="attention",
    ),
]
