"""The linears of a user's model: which there are, and what a Model says of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from narrowfuzz.arms.model_names import tied_names
from narrowfuzz.own_models.affected import has_computed_weight
from narrowfuzz.own_models.changing import is_expanded
from narrowfuzz.own_models.first import buffers_of
from narrowfuzz.own_models.source import Source
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.own import OwnModel


def linears_of(source: Source, module: nn.Module) -> tuple[dict[str, nn.Linear], str]:
    """Name -> linear of a model that is built on the CPU, and the dtype of the first linear. Raises
    ValueError if it is built elsewhere, or has no linear of a supported dtype."""
    elsewhere = {t.device.type for t in (*module.parameters(), *module.buffers())} - {"cpu"}
    if elsewhere:
        raise source.refused(
            f"it is built on {', '.join(sorted(elsewhere))}: build it on the CPU; the run "
            "moves it to its device"
        )
    if why := _closed(module):
        raise source.refused(why)
    linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise source.refused("it has no nn.Linear: there is nothing that a recipe would quantise")
    kind = next(iter(linears.values())).weight.dtype
    dtype = next((name for name, one in DTYPES.items() if one == kind), "")
    if not dtype:
        dtype_name = str(kind).removeprefix("torch.")
        raise source.refused(f"its first linear is {dtype_name}: use fp32, bf16 or fp16")
    before, state = buffers_of(module), torch.get_rng_state()
    for name, linear in linears.items():
        _ = linear.weight
        if not torch.equal(torch.get_rng_state(), state):
            raise source.refused(
                f"each time that the weight of {name} is read, random numbers are drawn, as a "
                "dropout of weights draws them: narrowfuzz reads weights to judge products. Build "
                "it without, or in eval()"
            )
        if buffers_of(module) != before:
            raise source.refused(
                f"each time that the weight of {name} is read, a buffer changes, as "
                "torch.nn.utils.parametrizations.spectral_norm changes it in training mode: "
                "narrowfuzz reads weights to judge products. Build it without, or in eval()"
            )
    return linears, dtype


def _closed(module: nn.Module) -> str:
    """Why the modules of a model cannot be observed, or their parameters cannot be set; "" if they
    can."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = name or "the model itself"
            return (
                f"{which} is compiled by torch.jit: it takes no hooks, with which narrowfuzz sees "
                "what runs, and a conversion does not reach linears in it. Build it without "
                "torch.jit.script and torch.jit.trace"
            )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            return (
                f"{name} gets its shape in the first forward, as in nn.LazyLinear: call the model "
                "once where it is built"
            )
    for name, parameter in module.named_parameters():
        if is_expanded(parameter):
            return (
                f"elements of its parameter {name} share memory, which nothing can write to: build "
                "it with contiguous()"
            )
    return ""


def fields_of(own: OwnModel, linears: Mapping[str, nn.Linear]) -> dict[str, Any]:
    """What a Model says of its linears, by field."""
    addresses = {name: f"model.{name}".rstrip(".") for name in linears}
    own_forwards = {n for n, one in linears.items() if type(one).forward is not nn.Linear.forward}
    computed = {n for n, one in linears.items() if has_computed_weight(one)}
    return {
        "linears": tuple(addresses.values()),
        "linear_rows": tuple(linear.out_features for linear in linears.values()),
        "own_forwards": tuple(addresses[name] for name in linears if name in own_forwards),
        "computed_weights": tuple(addresses[name] for name in linears if name in computed),
        "tied_biases": {
            name: first
            for name, first in tied_names(own).items()
            if name.endswith(".bias") and name.removeprefix("model.").rpartition(".")[0] in linears
        },
    }
