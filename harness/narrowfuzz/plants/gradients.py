"""Faults in gradients: added once too often, or never cleared by the optimizer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

_ALL = ("torch.fp32", "torch.bf16", "torch.scaled_mm", "torchao.*")


def _parameters(roots: Any) -> Counter[Any]:
    """Every parameter that the graph of ``roots`` reaches, with the number of its uses."""
    import torch

    found: Counter[Any] = Counter()
    waiting = [t.grad_fn for t in ([roots] if isinstance(roots, torch.Tensor) else roots)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for next_node, _ in node.next_functions:
            leaf = getattr(next_node, "variable", None)
            if isinstance(leaf, torch.nn.Parameter):
                found[leaf] += 1
            waiting.append(next_node)
    return found


@contextmanager
def _backward(change: Callable[[Any, Any, int], Any]) -> Iterator[None]:
    """``change(grad, before, uses)`` returns the gradient that a parameter has after a backward:
    ``grad`` is the right one, ``before`` that before the backward or None, ``uses`` the number of
    places in the graph that use the parameter. float64 parameters, those of reference runs, keep
    the right one.
    """
    import torch

    here = threading.local()

    def make(backward: Any) -> Any:
        def ran(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if getattr(here, "runs", False):  # a torch function mode calls it a second time
                backward(tensors, *args, **kwargs)
                return
            here.runs = True
            try:
                changed(tensors, *args, **kwargs)
            finally:
                here.runs = False

        def changed(tensors: Any, *args: Any, **kwargs: Any) -> None:
            uses = {p: n for p, n in _parameters(tensors).items() if p.dtype is not torch.float64}
            before = {p: None if p.grad is None else p.grad.clone() for p in uses}
            backward(tensors, *args, **kwargs)
            with torch.no_grad():
                for parameter, n in uses.items():
                    grad = parameter.grad
                    if grad is not None:
                        grad.copy_(change(grad, before[parameter], n))

        return ran

    with attribute_replaced(torch.autograd, "backward", make):
        yield


def _accumulated_twice(grad: Any, before: Any, uses: int) -> Any:
    """Both the kernel and autograd add the gradient of earlier backwards."""
    return grad if before is None else grad + before


def _once_a_name(grad: Any, before: Any, uses: int) -> Any:
    """A tensor with several uses gets its whole gradient once for each of them."""
    if uses < 2:
        return grad
    return grad * uses if before is None else before + (grad - before) * uses


@contextmanager
def _never_cleared() -> Iterator[None]:
    import torch

    def make(zero_grad: Any) -> Any:
        def zero_reference_only(self: Any, *args: Any, **kwargs: Any) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            if any(p.dtype is torch.float64 for p in parameters):
                zero_grad(self, *args, **kwargs)

        return zero_reference_only

    with attribute_replaced(torch.optim.Optimizer, "zero_grad", make):
        yield


PLANTS = [
    Plant(
        "gradient-accumulated-twice",
        "gradient",
        "a second microbatch doubles the first's",
        "https://github.com/NVIDIA/TransformerEngine/pull/1026",
        _ALL,
        lambda: _backward(_accumulated_twice),
    ),
    Plant(
        "tied-gradient-doubled",
        "gradient",
        "a weight used twice gets twice its gradient",
        "https://github.com/pytorch/torchtitan/pull/3174",
        _ALL,
        lambda: _backward(_once_a_name),
    ),
    Plant(
        "gradient-never-cleared",
        "gradient",
        "a step's gradients hold those of the step before",
        "https://github.com/deepspeedai/DeepSpeed/issues/7837",
        _ALL,
        _never_cleared,
    ),
]
