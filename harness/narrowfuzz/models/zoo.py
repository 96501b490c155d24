"""The models by name: how a Spec's dimensions become a module, and what may be expected of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from narrowfuzz.case import OF_IDS, ModelName, Spec
from narrowfuzz.play import models as blocks

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Model:
    """One architecture."""

    name: ModelName
    title: str
    module: type[nn.Module]
    #: Constructor arguments for a Spec.
    arguments: Callable[[Spec], Arguments]
    #: True: two runs draw different numbers unless the generator is reset.
    random: bool = False
    #: True: nothing but linears and pointwise operations that IEEE fixes to the bit: no float sum
    #: outside a GEMM, no libm function, no sum of two GEMMs (a compiler makes it one addmm).
    pointwise: bool = False
    attends: bool = False
    #: The linear that makes the output, used once and by nothing else; "" if none does.
    last: str = ""
    #: Submodules that are recomputed one by one; () recomputes the whole model.
    regions: tuple[str, ...] = ()

    @property
    def takes_ids(self) -> bool:
        """True: the input is token ids below n, not features."""
        return self.name in OF_IDS

    def build(self, spec: Spec, *, dtype: torch.dtype, device: str) -> nn.Module:
        """The module with fresh parameters."""
        with torch.device(device):
            return self.module(*self.arguments(spec)).to(dtype)

    def expression(self, spec: Spec) -> str:
        """The constructor call as text."""
        return f"{self.module.__name__}({', '.join(map(repr, self.arguments(spec)))})"


def heads_of(spec: Spec) -> int:
    """The drawn number of heads, where it divides the width."""
    return math.gcd(spec.heads, spec.k) or 1


def _attention(spec: Spec) -> Arguments:
    return spec.k, heads_of(spec), spec.attention == "flash"


def _block(spec: Spec) -> Arguments:
    return spec.k, spec.n, heads_of(spec), spec.attention == "flash"


def _wide(spec: Spec) -> Arguments:
    return spec.k, spec.n, spec.bias


MODELS: dict[ModelName, Model] = {
    model.name: model
    for model in (
        Model(
            "linear", "one linear inside a container", blocks.OneLinear, _wide, pointwise=True
        ),
        Model("mlp_gelu", "up, GELU, down", blocks.GeluMLP, _wide, last="down"),
        Model("mlp_swiglu", "SwiGLU feed-forward", blocks.SwiGLU, _wide, last="w2"),
        Model(
            "rmsnorm_linear", "RMSNorm and a linear", blocks.NormLinear,
            lambda spec: ("rms", *_wide(spec)), last="proj",
        ),
        Model(
            "layernorm_linear", "LayerNorm and a linear", blocks.NormLinear,
            lambda spec: ("layer", *_wide(spec)), last="proj",
        ),
        Model(
            "attention", "causal self-attention", blocks.Attention, _attention,
            attends=True, last="wo",
        ),
        Model(
            "llama_block", "RMSNorm, attention, RMSNorm, SwiGLU", blocks.LlamaBlock, _block,
            attends=True,
        ),
        Model(
            "two_blocks", "two Llama blocks, recomputed one by one", blocks.TwoBlocks, _block,
            attends=True, regions=("layers.0", "layers.1"),
        ),
        Model(
            "joined_blocks", "two Llama blocks, recomputed as one region", blocks.TwoBlocks, _block,
            attends=True,
        ),
        Model(
            "tied_embedding", "embedding whose weight is the head's too", blocks.TiedHead,
            lambda spec: (spec.n, spec.k),
        ),
        Model("dropout", "MLP with dropout", blocks.DroppedOut, _wide, random=True, last="down"),
        Model(
            "used_twice", "one linear called twice", blocks.UsedTwice,
            lambda spec: (spec.k, spec.bias),
        ),
        Model(
            "frozen_first", "MLP whose first layer does not train", blocks.FrozenFirst, _wide,
            pointwise=True, last="second",
        ),
        Model(
            "hooked", "a linear with hooks and attributes", blocks.Hooked, _wide, pointwise=True
        ),
        Model(
            "own_forward", "a subclass of nn.Linear with its own forward", blocks.OwnForward,
            _wide, pointwise=True,
        ),
    )
}  # fmt: skip


@cache
def parameter_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, tied ones once."""
    module = MODELS[spec.model].build(spec, dtype=torch.float32, device="meta")
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


@cache
def layer_names(spec: Spec) -> tuple[str, ...]:
    """``linear_names`` of the Spec's model."""
    return linear_names(MODELS[spec.model].build(spec, dtype=torch.float32, device="meta"))


@cache
def ties(spec: Spec) -> dict[str, str]:
    """``tied_names`` of the Spec's model."""
    return tied_names(MODELS[spec.model].build(spec, dtype=torch.float32, device="meta"))


@cache
def gradient_names(spec: Spec) -> frozenset[str]:
    """Names, as a Trace uses them, of every gradient that a backward must leave."""
    if not spec.trains:
        return frozenset()
    model = MODELS[spec.model]
    module = model.build(spec, dtype=torch.float32, device="meta")
    names = {f"{name}.grad" for name, p in module.named_parameters() if p.requires_grad}
    if spec.direct:
        names = {"grad_weight", "grad_bias"} if spec.bias else {"grad_weight"}
    return frozenset(names if model.takes_ids else names | {"grad_input"})


def linear_names(module: nn.Module) -> tuple[str, ...]:
    """Dotted names of the linears a recipe may convert, in registration order."""
    return tuple(name for name, m in module.named_modules() if isinstance(m, nn.Linear))


def tied_names(module: nn.Module) -> dict[str, str]:
    """Parameters that are another one under a second name -> that one's first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied
