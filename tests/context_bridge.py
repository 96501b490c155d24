"""PyTorch's context parallelism with a CPU's attention, for tests: its ring, its rotation, its
merge and its balance of rows run as they do on GPUs; only which kernel it calls is ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import planted
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_aten = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _attend(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    q, k, v = args[:3]
    mesh, placements = q.device_mesh, q.placements
    causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    out, lse = ring._templated_ring_attention(
        mesh.get_group(), 2, _kernel, query=q.to_local(), key=k.to_local(), value=v.to_local(),
        is_causal=causal, scale=kwargs.get("scale"),
    )[:2]  # fmt: skip
    return tuple(DTensor.from_local(t, mesh, placements, run_check=False) for t in (out, lse))


def _kernel(q: Any, k: Any, v: Any, is_causal: bool = False, scale: Any = None) -> Any:
    return _FORWARD(q, k, v, 0.0, is_causal, scale=scale)


def _back(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, q, k, v, out, lse = (t.to_local() for t in args[:6])
    mesh, placements = args[1].device_mesh, args[1].placements
    grads = ring._templated_ring_attention_backward(
        mesh.get_group(), 2, _kernel_back, grad_out=grad, grad_out_name="grad_out", query=q, key=k,
        value=v, out=out, logsumexp=lse, is_causal=args[7], scale=kwargs.get("scale"),
    )[:3]  # fmt: skip
    return tuple(DTensor.from_local(t, mesh, placements, run_check=False) for t in grads)


def _kernel_back(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool,
    scale: Any = None,
) -> Any:  # fmt: skip
    return _BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale)


@contextmanager
def bridged() -> Iterator[None]:
    """While this is entered, context parallelism knows a CPU's attention."""
    before = dict(ring.custom_ops)
    ring.custom_ops.update({_FORWARD: _attend, _BACKWARD: _back})
    try:
        yield
    finally:
        ring.custom_ops.clear()
        ring.custom_ops.update(before)


@contextmanager
def _merged_alike() -> Iterator[None]:
    with bridged(), planted("", "context-merged-alike"):
        yield


PLANTS = [
    Plant("bridge", "legal", "a CPU's attention goes around", "tests", ("torch.*",), bridged),
    Plant("bridge-merged-alike", "sharding", "and is merged wrong", "tests", ("torch.*",),
          _merged_alike),
]  # fmt: skip
