"""The description of a model: how it is built for a Spec, and what may be expected of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from narrowfuzz.models.relations import Relation

if TYPE_CHECKING:
    import torch
    from torch import nn

Arguments = tuple[Any, ...]

#: What ``shown_by`` of an entry calls attention with a mask that adds finite numbers to scores, and
#: an operator such as ``y += x`` whose ``y`` is what a linear, or ``x @ weight``, returned.
FINITE_MASK, WRITTEN_PRODUCT = "attention with a finite mask", "in-place write to a product"
#: What a user's own model may do besides calling operators that have deviations.
CALLS = frozenset({FINITE_MASK, WRITTEN_PRODUCT})
#: What a user's own model may have besides modules of a class.
SEVERAL_NAMES, TIED = "Linear of several names", "tied parameter"
HOOKED, COMPUTED = "parameter with hooks or attributes", "Linear with a computed weight"
PARTS = frozenset({SEVERAL_NAMES, TIED, HOOKED, COMPUTED})


@dataclass(frozen=True)
class Product:
    """The product of one call of a linear."""

    layer: str
    rows: int
    k: int
    n: int


@dataclass(frozen=True)
class Gradients:
    """What gradients a user's own model has besides those of its linears' products."""

    #: Parameters and inputs (``model.head.weight``, ``model.head.input``) of linears whose
    #: gradients are not those of their linears' products alone.
    elsewhere: tuple[str, ...] = ()
    #: True: hooks of the model's own change gradients.
    hooked: bool = False
    #: True: a forward, or a gradient that it takes, may use some parameter several times.
    reused: bool = False
    #: True: a forward takes gradients that have gradients of their own.
    twice: bool = False
    #: Names of parameters of other dtypes than the first linear -> these dtypes, "" for those that
    #: no recipe knows.
    dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Model:
    """One architecture."""

    name: str
    title: str
    #: Name of its class in ``play/``, and the constructor's arguments for a Spec.
    module: str
    arguments: Callable[[Any], Arguments]
    #: The group that it belongs to; a run over all models runs them group by group.
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
    #: Its input is used in more than two places, whose gradients are added.
    branches: bool = False
    #: The linear whose result is the output, if it is called once and its parameters are used
    #: nowhere else; else "".
    last: str = ""
    #: Submodules that are recomputed one by one; () recomputes the whole model.
    regions: tuple[str, ...] = ()
    #: Submodules, each called once, that a nested checkpoint wraps inside that of the whole model.
    parts: tuple[str, ...] = ()
    #: (submodule, how tensor parallelism shards it), from the input to the output: linears by
    #: output or by input features ("either": the Spec chooses), norms by the rows of a sequence.
    shared: tuple[tuple[str, Literal["colwise", "rowwise", "either", "sequence"]], ...] = ()
    #: Number of experts per layer that ranks may share; 0: there are none that they may.
    experts: int = 0
    #: It is a loss of logits, whose classes ranks may share.
    classes: bool = False
    #: Fields of a sharding that the model prescribes: under "data" if there are data-parallel
    #: ranks, under "tensor" if there are tensor-parallel ranks.
    prescribed_sharding: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    #: The weight with which it is drawn: 2 for models on which a rung or a kind of checkpointing
    #: fails that works on others.
    draw_weight: int = 1
    #: The weight with which it is drawn for compiled partial recompute: higher for models with
    #: longer regions, in which there is more to fuse.
    fragile: int = 0
    #: Models to try instead when a case is minimised, smallest first.
    smaller: tuple[str, ...] = ("linear",)
    #: Fields of a Spec that the model prescribes.
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: The package that the model comes from; only recipes for that package run it.
    package: str = ""
    #: False: compiling it takes minutes, and it is not drawn on compiled rungs.
    compiled: bool = True
    #: True: a user's own model (``own_models``).
    own: bool = False
    #: Names of the linears of a user's own model; their numbers of output features; and the further
    #: names of those that have several -> their first names.
    linears: tuple[str, ...] = ()
    linear_rows: tuple[int, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Biases of those linears that another module holds, too, under a name that comes first -> that
    #: name, by which their gradients are known: ``lm_head.decoder.bias`` -> ``lm_head.bias``.
    tied_biases: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Those of a subclass of ``nn.Linear`` with a forward of its own.
    own_forwards: tuple[str, ...] = ()
    #: Those whose weight is no parameter, but computed from some, as by ``weight_norm``.
    computed_weights: tuple[str, ...] = ()
    #: Trainable parameters of a user's own model that get no gradient with its example input.
    unreached: tuple[str, ...] = ()
    #: Those that get one with some inputs only, such as those of experts.
    reached_by_chance: tuple[str, ...] = ()
    #: Where the gradients of a user's own model come from besides the products of its linears.
    gradients: Gradients = Gradients()
    #: True: each of ``regions`` is given a tensor that needs a gradient, although the input of this
    #: user's own model has none.
    regions_get_gradients: bool = False
    #: True: the input of this user's own model is handed over without its gradient, because the
    #: model sets ``requires_grad`` of it.
    cut: bool = False
    #: A block of a user's own model that computes something else when it is called again; if there
    #: is one, checkpoints wrap the whole model and no blocks.
    unrepeatable: str = ""
    #: Blocks of a user's own model that FSDP can gather by themselves, because their parameters are
    #: used nowhere else; and, as the end of a sentence, why FSDP does not shard one of them all.
    units: tuple[str, ...] = ()
    unshardable: str = ""
    #: As the end of a sentence, why ranks cannot train it, if no other field tells.
    alone: str = ""
    #: False: the state_dict of a user's own model has other names than its parameters and buffers.
    saves_as_named: bool = True
    #: Buffers that each forward changes: counters, running statistics.
    changing: tuple[str, ...] = ()
    #: Those of them that a state_dict holds: results at the end of a training.
    saved_buffers: tuple[str, ...] = ()
    #: Parameters of a user's own model that each forward changes by itself.
    changing_parameters: tuple[str, ...] = ()
    #: Those of ``changing`` and ``changing_parameters`` that the recompute of a checkpoint changes
    #: again: those of modules that it recomputes, and others that these change.
    changing_again: tuple[str, ...] = ()
    #: True: what its forward computes depends on the forwards before, which changed buffers or
    #: parameters.
    remembers: bool = False
    #: The products of the linears of a user's own model in one forward, in their order.
    products: tuple[Product, ...] = ()
    #: The tensors that a user's own model is called with, as text.
    inputs: tuple[str, ...] = ()
    #: Names of the operators (``operators/``) that a single-operator model consists of, or that a
    #: user's own model calls; None: unknown.
    operators: frozenset[str] | None = None
    #: What a user's own model has, as ``own_models.affected.parts_of`` names it: classes of
    #: modules, linears of several names, tied parameters, hooks; None: unknown.
    modules: frozenset[str] | None = None
    #: Names of the deviations of kernels (``operators/``) that may affect the calls of a user's own
    #: model, and those of ``CALLS`` that it makes; None: unknown.
    affected: frozenset[str] | None = None
    #: Value classes that a single operator is sensitive to: about half of its cases have one.
    values: tuple[str, ...] = ()
    #: The meaning of ``n`` for a single operator, for example "keys"; "" if n has no effect.
    columns: str = ""
    #: How the results of a single operator must change when its operands change.
    relations: tuple[Relation, ...] = ()
    #: The only device type for which torch has a kernel; "" for all.
    device: str = ""
    #: Device type -> dtypes for which torch has no kernel there.
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    #: Its kernels are Triton's: on a CPU it runs only if their interpreter is switched on.
    interpreted: bool = False
    #: Why it must raise an error, by the documentation or because a single process does; "" if it
    #: must not.
    forbidden: str = ""
    #: False for a user's own model that is built with other arguments than its defaults.
    by_default: bool = True

    def build(self, spec: Any, *, dtype: torch.dtype, device: str) -> nn.Module:
        """The module with fresh parameters."""
        import torch

        from narrowfuzz.play import group_models, models, operator_models, own, te_experts, titan

        if self.package and find_spec(self.package) is None:
            raise ValueError(
                f"the model {self.name} is {self.package}'s own, which this process has not loaded"
            )
        ours = (operator_models, group_models) if self.kind == "operator" else (models,)
        of_packages = {"torchtitan": (titan,), "transformer_engine": (te_experts,)}
        homes: Any = (own,) if self.own else of_packages.get(self.package, ours)
        home = next(home for home in homes if hasattr(home, self.module))
        with torch.device(device):
            made: nn.Module = getattr(home, self.module)(*self.arguments(spec))
            return made.to(device, None if self.keeps(spec, dtype) else dtype)

    def keeps(self, spec: Any, dtype: torch.dtype) -> bool:
        """True if parameters and buffers keep the dtype that they are built in. A user's own model
        is built in the Spec's dtype, except for parts that the user keeps in another. (Scripts
        build it in the same way.)"""
        from narrowfuzz.play.dtypes import DTYPES

        return self.own and dtype == DTYPES[spec.dtype]

    @property
    def input_grad(self) -> bool:
        """True if a backward gives its input a gradient."""
        return not (self.takes_ids or self.cut)

    @property
    def multiplications(self) -> int:
        """Number of scalar multiplications in the linears of a user's own model in one forward."""
        return sum(product.rows * product.k * product.n for product in self.products)

    @property
    def changes_buffers_again(self) -> bool:
        """True if a checkpoint's recompute changes a buffer that the forward has changed."""
        return not {*self.changing}.isdisjoint(self.changing_again)

    @property
    def only_read(self) -> tuple[str, ...]:
        """The linears of a user's own model that it does not call, though its functions use their
        parameters: a product of several weights at once, or the last one of
        ``nn.MultiheadAttention``."""
        called = {product.layer for product in self.products}
        read = {name.rpartition(".")[0] for name in self.gradients.elsewhere}
        idle = {f"model.{n}".removesuffix(".weight") for n in self.unreached}
        return tuple(name for name in self.linears if name in read - called - idle)

    def computes_weight(self, name: str) -> bool:
        """Is this the name of a linear with a computed weight, or of a module in one?"""
        return any(f"{name}.".startswith(f"{linear}.") for linear in self.computed_weights)

    def runs_on(self, device: str, dtypes: Collection[str]) -> bool:
        """True if there are kernels for it on this device type in all of these dtypes."""
        return not self.why_not(device, dtypes)

    def why_not(self, device: str, dtypes: Collection[str]) -> str:
        """Why it cannot run on this device type in all of these dtypes; "" if it can."""
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
        """True for a parameter of experts that ranks share."""
        return bool(sharding.experts) and parameter.startswith("experts.")

    def styles(self, spec: Any) -> dict[str, str]:
        """Submodule -> how tensor parallelism shards it for this Spec."""
        own = spec.sharding.style
        return {name: own if style == "either" else style for name, style in self.shared}

    def expression(self, spec: Any) -> str:
        """The constructor call as text."""
        return f"{self.module}({', '.join(map(repr, self.arguments(spec)))})"


@dataclass(frozen=True)
class Layer:
    """One of a library's own layers, of which models are made."""

    name: str
    #: Weight and bias of the linear whose result is the layer's output; () if there is none.
    last: tuple[str, ...] = ("weight", "bias")
    #: It is nothing but a linear, so its input and output are those of the quantised GEMM.
    bare: bool = False
    #: If several layers are recomputed together, only the first updates its scales.
    updates_once: bool = False


def heads_of(spec: Any) -> int:
    """The number of heads: the greatest common divisor of ``spec.heads`` and the width."""
    return math.gcd(spec.heads, spec.k) or 1
