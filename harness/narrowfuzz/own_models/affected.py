"""Which calls of a user's model the known issues of kernels may affect."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowfuzz.models.model import FINITE_MASK
from narrowfuzz.operators import BY_KERNEL, BY_NAME
from narrowfuzz.own_models.calls import observe_call
from narrowfuzz.play.own import tensors_in


class _Affected(TorchDispatchMode):
    """Records the deviations that may affect the kernels that run inside it, and attention with a
    finite mask."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func.name()
        if operator := BY_KERNEL.get(name):
            given, returned = tensors_in([args, kwargs]), tensors_in(made)
            self.names |= {d.name for d in operator.deviations if d.may_affect(given, returned)}
        mask = kwargs.get("attn_mask")
        if "scaled_dot_product" in name and mask is not None and _adds(mask):
            self.names.add(FINITE_MASK)
        return made


def _adds(mask: torch.Tensor) -> bool:
    """Does it add finite numbers to scores, where a boolean mask leaves them or excludes them?"""
    return mask.dtype != torch.bool and bool((mask.isfinite() & (mask != 0)).any())


def affected(
    model: nn.Module, call: Callable[[], Any], operators: Collection[str], *, autocast: bool
) -> frozenset[str] | None:
    """The names of the deviations that may affect a forward and backward of the model, of those of
    the ``operators`` that it calls, and FINITE_MASK. ``autocast``: it may also run under autocast.
    None if it raises there, or in backward."""
    composed = (BY_NAME[name] for name in operators if BY_NAME[name].functions)
    kernels = _Affected()
    kernels.names |= {deviation.name for one in composed for deviation in one.deviations}
    try:
        for narrowed in (False, True)[: 1 + autocast]:
            with kernels:
                with torch.autocast("cpu", torch.bfloat16) if narrowed else nullcontext():
                    floats = observe_call(model, call).floats
                ends = [t for t in floats if t.requires_grad]
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except Exception:  # noqa: BLE001 - the judge runs it again, and what it raises is a finding
        return None
    return frozenset(kernels.names)
