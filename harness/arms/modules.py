"""Replacing layers in a module tree, for recipes whose library leaves that to the user."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def swap_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """``model`` with every nn.Linear in it replaced by ``make`` of it, itself included.

    A layer used in two places becomes one new layer used in two places.
    """
    made: dict[int, nn.Module] = {}

    def replacement(module: nn.Module | None) -> nn.Module | None:
        if not isinstance(module, nn.Linear):
            return None
        if id(module) not in made:
            made[id(module)] = make(module)
        return made[id(module)]

    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children leaves out second uses
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)
    return replacement(model) or model
