"""The order in which FSDP adds up the gradients of a tensor that its units read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Same(torch.autograd.Function):
    """Returns its arguments. What its results get in backward is added up before it reaches them,
    as before FSDP's ``RegisterPostBackwardFunction``, to which all inputs of a unit go."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def add_up_by_unit(model: nn.Module, units: Iterable[str]) -> nn.Module:
    """The model, in which the uses of a tensor inside one of these modules are added up before the
    uses outside, as they are where FSDP shards these modules."""
    for unit in units:
        model.get_submodule(unit).register_forward_pre_hook(_through, with_kwargs=True)
    return model


def _through(module: nn.Module, args: Any, named: Any) -> Any:
    held, structure = tree_flatten((args, named))
    where = [i for i, x in enumerate(held) if isinstance(x, torch.Tensor) and x.requires_grad]
    if where and torch.is_grad_enabled():
        for i, same in zip(where, _Same.apply(*(held[i] for i in where)), strict=True):
            held[i] = same
    return tree_unflatten(held, structure)
