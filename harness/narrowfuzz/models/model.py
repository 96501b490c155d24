"""What a model is: how a Spec's dimensions become one, and what may be expected of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from narrowfuzz.models.relations import Relation

if TYPE_CHECKING:
    import torch
    from torch import nn

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Model:
    """One architecture."""

    name: str
    title: str
    #: Its class in ``play/``, and what is given to that for a Spec.
    module: str
    arguments: Callable[[Any], Arguments]
    #: What it belongs to: where all models are run, they are run in these groups.
    kind: Literal["linear", "mlp", "norm", "block", "operator"]
    #: True: the output has n features, not k.
    wide: bool = False
    #: True: the input is token ids below n, not features.
    takes_ids: bool = False
    #: True: two runs draw different numbers unless the generator is reset.
    random: bool = False
    #: True: nothing but linears and pointwise operations that IEEE fixes to the bit: no float sum
    #: outside a GEMM, no libm function, no sum of two GEMMs (a compiler makes it one addmm).
    pointwise: bool = False
    attends: bool = False
    normalises: bool = False
    #: Its input goes more than two ways at once, whose gradients are added up.
    branches: bool = False
    #: The linear that makes the output, used once and by nothing else; "" if none does.
    last: str = ""
    #: Submodules that are recomputed one by one; () recomputes the whole model.
    regions: tuple[str, ...] = ()
    #: Submodules, each called once, that a nested checkpoint wraps inside that of the whole.
    parts: tuple[str, ...] = ()
    #: How tensor parallelism shares it, from its input to its output: linears by output features or
    #: by input features ("either" is a Spec's choice), norms by the rows of a sequence.
    shared: tuple[tuple[str, Literal["colwise", "rowwise", "either", "sequence"]], ...] = ()
    #: So many experts of each layer, which ranks may share; 0: it has none that they may.
    experts: int = 0
    #: It is a loss of logits, whose classes ranks may share.
    classes: bool = False
    #: Fields of a sharding that it leaves no choice of, where there are ``data``-parallel and where
    #: there are ``tensor``-parallel ranks.
    laid: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    #: How often it is drawn, of all; where a rung or a checkpointing goes wrong that is right
    #: elsewhere, twice.
    often: int = 1
    #: How often it is drawn where partial recompute of a fused chain is compiled: the longer its
    #: region, the more there is to fuse.
    fragile: int = 0
    #: What to look at instead when a case is minimised, smallest first.
    smaller: tuple[str, ...] = ("linear",)
    #: Fields of a Spec that the model leaves no choice of.
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: The package that it is the own model of: its recipes run it, and no others do.
    package: str = ""
    #: False: compiling it takes minutes, and it is not drawn on compiled rungs.
    compiled: bool = True
    #: True: a user's (``own_models``), whose linears these are.
    own: bool = False
    linears: tuple[str, ...] = ()
    #: A user's parameters that train, and get no gradient from what it returns for the example.
    unreached: tuple[str, ...] = ()
    #: A block of a user's that computes something else when called again: checkpoints take the
    #: whole model then, and no block.
    unrepeatable: str = ""
    #: Buffers that each forward of a user's changes: what is counted, running statistics.
    changing: tuple[str, ...] = ()
    #: How often a user's linears multiply in a forward.
    multiplications: int = 0
    #: The tensors that a user's is called with, in words.
    inputs: tuple[str, ...] = ()
    #: The operators of ``operators/`` that it is nothing but, or that a user's calls; None: not
    #: known.
    operators: frozenset[str] | None = None
    #: Classes of values that it is sensitive to, of an operator alone: half of its cases have one.
    values: tuple[str, ...] = ()
    #: What there are n of, of an operator alone: "keys"; "" where n is of no consequence.
    columns: str = ""
    #: What other operands must make of its results, of an operator alone.
    relations: tuple[Relation, ...] = ()
    #: The type of device that it runs on, "" for all: torch has no kernel for it on others.
    device: str = ""
    #: Types of device, and the dtypes that torch has no kernel of it for there.
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    #: Its kernels are Triton's: on a CPU it runs where their interpreter is asked for.
    interpreted: bool = False
    #: Why it must raise an error, as the documentation or one process says; "" of others.
    forbidden: str = ""
    #: False of a user's that is called with other values than its defaults.
    by_default: bool = True

    def build(self, spec: Any, *, dtype: torch.dtype, device: str) -> nn.Module:
        """The module with fresh parameters."""
        import torch

        from narrowfuzz.play import models, operator_models, own, titan

        alone = operator_models if self.kind == "operator" else models
        classes: Any = own if self.own else titan if self.package else alone
        with torch.device(device):
            made: nn.Module = getattr(classes, self.module)(*self.arguments(spec))
            return made.to(device, None if self.keeps(spec, dtype) else dtype)

    def keeps(self, spec: Any, dtype: torch.dtype) -> bool:
        """Does each parameter and buffer keep the precision that it is built in? A user's model has
        that of the Spec already, but for the parts that its user holds in another. (Scripts build
        it so, too.)"""
        from narrowfuzz.play.dtypes import DTYPES

        return self.own and dtype == DTYPES[spec.dtype]

    def runs_on(self, device: str, dtypes: Collection[str]) -> bool:
        """Are there kernels for it on this type of device, in each of these dtypes?"""
        return not self.why_not(device, dtypes)

    def why_not(self, device: str, dtypes: Collection[str]) -> str:
        """Why it cannot run on this type of device, in each of these dtypes; "" where it can."""
        if self.interpreted and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "its kernels are Triton's, which a CPU interprets: --with triton==3.6.0"
        if self.device not in ("", device):
            return f"it has kernels on {self.device} alone"
        lacking = sorted({*dtypes} & {*self.lacks.get(device, ())})
        return f"{device} has no kernels for it in {', '.join(lacking)}" if lacking else ""

    def recomputed(self, spec: Any) -> tuple[tuple[str, ...], bool]:
        """Submodules that a Spec's checkpoint wraps one by one, and whether it wraps the whole."""
        return (self.parts, True) if spec.wraps == "nested" else (self.regions, not self.regions)

    def shares(self, parameter: str, sharding: Any) -> bool:
        """Is this a parameter of experts that ranks share?"""
        return bool(sharding.experts) and parameter.startswith("experts.")

    def styles(self, spec: Any) -> dict[str, str]:
        """How a Spec's tensor parallelism shares its linears."""
        own = spec.sharding.style
        return {name: own if style == "either" else style for name, style in self.shared}

    def expression(self, spec: Any) -> str:
        """The constructor call as text."""
        return f"{self.module}({', '.join(map(repr, self.arguments(spec)))})"


@dataclass(frozen=True)
class Layer:
    """One of a library's own layers, of which a model is made."""

    name: str
    #: Weight and bias of the linear that makes its output; none: no linear does.
    last: tuple[str, ...] = ("weight", "bias")
    #: It is a linear and nothing else, so that its edges show what is quantised.
    bare: bool = False
    #: Of several that are recomputed together only the first updates its scales.
    updates_once: bool = False


def heads_of(spec: Any) -> int:
    """The drawn number of heads, where it divides the width."""
    return math.gcd(spec.heads, spec.k) or 1
