"""The order in which FSDP adds up the gradients of a tensor that its units read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def add_up_by_unit(model: nn.Module, units: Iterable[str]) -> nn.Module:
    """The model, in which the uses of a tensor inside one of these modules are added up before the
    uses outside, as where FSDP shards these modules: there the inputs of a unit go through its
    ``RegisterPostBackwardFunction``."""
    for unit in units:
        model.get_submodule(unit).register_forward_pre_hook(_through_views, with_kwargs=True)
    return model


def _through_views(module: nn.Module, args: Any, named: Any) -> Any:
    if not torch.is_grad_enabled():
        return args, named
    return tree_map_only(torch.Tensor, _view, (args, named))


def _view(x: torch.Tensor) -> torch.Tensor:
    # unlike behind an autograd.Function, what the unit writes into it is allowed, and seen outside
    return x.view_as(x) if x.requires_grad else x
