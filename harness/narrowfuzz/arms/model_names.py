"""The parameters, linears, ties and gradients of a Spec's model, read from the module itself."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS


@cache
def parameter_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter; tied ones are listed once."""
    return {name: tuple(p.shape) for name, p in _bare(spec).named_parameters()}


@cache
def layer_names(spec: Spec) -> tuple[str, ...]:
    """``linear_names`` of the Spec's model."""
    return linear_names(_bare(spec))


@cache
def ties(spec: Spec) -> dict[str, str]:
    """``tied_names`` of the Spec's model."""
    return tied_names(_bare(spec))


@cache
def gradient_names(spec: Spec) -> frozenset[str]:
    """Names, as a Trace uses them, of every gradient that a backward must produce."""
    if not spec.trains:
        return frozenset()
    model = MODELS[spec.model]
    trained = [f"{name}.grad" for name, p in _bare(spec).named_parameters() if p.requires_grad]
    names = {spec.gradients.get(name, name) for name in trained}
    return frozenset(names | {"grad_input"} if model.input_grad else names)


def _bare(spec: Spec) -> nn.Module:
    """The Spec's model, for inspection only. A user's model is built on the CPU and not moved to
    the meta device: moving would give each name a parameter of its own and untie tied ones."""
    model = MODELS[spec.model]
    return model.build(spec, dtype=torch.float32, device="cpu" if model.own else "meta")


def linear_names(module: nn.Module) -> tuple[str, ...]:
    """Dotted names of the linears a recipe may convert, in registration order."""
    return tuple(name for name, m in module.named_modules() if isinstance(m, nn.Linear))


def other_names(module: nn.Module) -> dict[str, str]:
    """Further names of linears that have several -> the linear's first name."""
    first = {id(m): name for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    every = module.named_modules(remove_duplicate=False)
    return {n: first[id(m)] for n, m in every if id(m) in first and first[id(m)] != n}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> the parameter's first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied
