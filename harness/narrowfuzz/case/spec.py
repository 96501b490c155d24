"""Spec, DataSpec and Case: plain data that defines one experiment completely.

A case is strict JSON with a schema version. Nothing in it is imported or executed; special values
are bit patterns. The invariant: the same Case yields the same program and the same tensors on any
machine.

>>> case = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
>>> load_case(dump_case(case)) == case
True
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from narrowfuzz.case.arm import Compile
from narrowfuzz.case.events import (
    Backward,
    Event,
    Forward,
    Layout,
    Settings,
    Step,
    Wraps,
    narrows,
    plain_training,
    with_regions,
)
from narrowfuzz.case.older import upgraded
from narrowfuzz.case.sharding import UNSHARDED, Sharding
from narrowfuzz.models.catalog import LIBRARY, MODELS, title_of, unknown_model

#: Schema 2 added models, a library's own layers and more rungs, 3 the variant, 4 ladder data, 5
#: events of converted models; 6 replaced the separate record of a library layers' training by
#: fields of the Spec. Older files keep their meaning.
SCHEMA = 6
#: A case file is under 3 kB; anything much larger is not one.
MAX_CASE_BYTES = 1 << 20

Dtype = Literal["fp32", "bf16", "fp16"]
if TYPE_CHECKING:
    ModelName = str
else:
    ModelName = Literal[tuple(MODELS)]
InputLayout = Literal["contiguous", "transposed", "strided"]
GradLayout = Literal["contiguous", "transposed", "expanded"]
#: ``selective`` saves the results of attention and every second matmul, and recomputes the rest.
Checkpoint = Literal["none", "full", "reentrant", "selective"]
#: A library's own layers may be recomputed by its own checkpoint, or by torch's.
AnyCheckpoint = Literal["none", "full", "reentrant", "selective", "by_torch", "by_torch_reentrant"]
#: Whose kernels run the GEMMs in eager runs: "default" oneDNN's, as users have it, "native"
#: PyTorch's own, "both" one after the other.
Kernels = Literal["default", "both", "native"]
GradMode = Literal["train", "no_grad", "inference"]
Optimizer = Literal[
    "sgd",
    "adamw",
    "sgd_foreach",
    "sgd_fused",
    "sgd_momentum",
    "sgd_momentum_fused",
    "adam_foreach",
    "adam_fused",
    "adamw_foreach",
    "adamw_fused",
    "adamw_8bit",
    "adamw_4bit",
    "adamw_fp8",
    "adamw_8bit_rounded",
    "adagrad",
    "adagrad_foreach",
    "adagrad_fused",
    "muon",
    "muon_plain",
]
_SGD, _ADAM = {"lr": 2.0**-6}, {"lr": 2.0**-8}
_MOMENTUM = {**_SGD, "momentum": 0.875, "dampening": 0.25, "weight_decay": 2.0**-7}
_ADAGRAD = {"lr": 2.0**-6, "lr_decay": 0.25}
_MUON = {"lr": 2.0**-2, "weight_decay": 2.0**-7}
#: Name -> (class in torch.optim, or in torchao.optim for ``LOW_BIT``, keyword arguments). Rates are
#: powers of two, so that a step rounds as little as possible.
OPTIMIZERS: dict[Optimizer, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", _SGD),
    "adamw": ("AdamW", _ADAM),
    "sgd_foreach": ("SGD", {**_SGD, "foreach": True}),
    "sgd_fused": ("SGD", {**_SGD, "fused": True}),
    "sgd_momentum": ("SGD", _MOMENTUM),
    "sgd_momentum_fused": ("SGD", {**_MOMENTUM, "fused": True}),
    "adam_foreach": ("Adam", {**_ADAM, "weight_decay": 2.0**-7, "foreach": True}),
    "adam_fused": ("Adam", {**_ADAM, "weight_decay": 2.0**-7, "fused": True}),
    "adamw_foreach": ("AdamW", {**_ADAM, "foreach": True}),
    "adamw_fused": ("AdamW", {**_ADAM, "fused": True}),
    "adamw_8bit": ("AdamW8bit", _ADAM),
    "adamw_4bit": ("AdamW4bit", _ADAM),
    "adamw_fp8": ("AdamWFp8", _ADAM),
    "adamw_8bit_rounded": ("AdamW8bit", {**_ADAM, "bf16_stochastic_round": True}),
    "adagrad": ("Adagrad", {**_ADAGRAD, "initial_accumulator_value": 0.125, "foreach": False}),
    "adagrad_foreach": ("Adagrad", {**_ADAGRAD, "weight_decay": 2.0**-7, "foreach": True}),
    "adagrad_fused": ("Adagrad", {**_ADAGRAD, "weight_decay": 2.0**-7, "fused": True}),
    "muon": ("Muon", _MUON),
    "muon_plain": ("Muon", {**_MUON, "nesterov": False}),
}
#: torchao's optimizers, which compile their steps.
LOW_BIT: tuple[Optimizer, ...] = ("adamw_8bit", "adamw_4bit", "adamw_fp8", "adamw_8bit_rounded")
#: Who scales the loss, and skips a step whose gradients are not finite: nobody, torch's GradScaler,
#: or the same algorithm written out by hand.
LossScaling = Literal["none", "grad_scaler", "by_hand"]
#: How gradients are clipped before each step: by their norm, by the largest of them (the norm of
#: order infinity), or each element by its value.
Clipping = Literal["none", "norm", "norm_inf", "value"]
#: What happens to the converted model before its first run.
Lifecycle = Literal["none", "deepcopy", "reload"]
#: ``lattice``: values whose sums are exact in every accumulator. ``ladder``: values whose sums
#: distinguish accumulators. ``wild``: one of the value classes.
Regime = Literal["lattice", "ladder", "wild"]
#: The three GEMMs of a linear.
Gemm = Literal["output", "grad_input", "grad_weight"]
ValueClass = Literal[
    "gaussian",
    "outlier",
    "heavy_tail",
    "zero_rows",
    "binade_edges",
    "mined",
    "near_max",
    "scale_ends",
    "subnormal",
    "inf_nan",
    "equal",
    "outlier_rows",
    "aligned",
]
TensorName = Literal["input", "weight", "grad_output", "bias"]
#: Largest number of rows, features or token ids in a case: of a shipped model, and of a user's own
#: model, whose sizes are those it was built with.
LARGEST, LARGEST_OWN = 4096, 1 << 20
Dim = Annotated[int, Meta(ge=0, le=LARGEST_OWN)]
Exponent = Annotated[int, Meta(ge=-60, le=60)]
HexBits = Annotated[str, Meta(pattern=r"^0x[0-9a-f]{8}\Z")]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that determines the program. Defaults are the simplest value of each field."""

    recipe: str
    #: Which of the recipe's code paths runs; "" is the recipe's first.
    backend: str = ""
    #: A key of ``MODELS``, where a user's own model is registered, or of ``LIBRARY``.
    model: str = "linear"
    #: Rows per batch entry (M), in_features or model width (K), out_features, hidden width or
    #: vocabulary (N).
    m: Dim = 32
    k: Dim = 32
    n: Dim = 32
    #: 0: the input is [m, k]. Otherwise [batch, m, k].
    batch: Annotated[int, Meta(ge=0, le=256)] = 0
    bias: bool = False
    dtype: Dtype = "bf16"
    input_layout: InputLayout = "contiguous"
    grad_layout: GradLayout = "contiguous"
    #: Memory layout of each parameter: "strided" is every second element of a larger tensor.
    weight_layout: InputLayout = "contiguous"
    #: Number of attention heads. Attention runs on the fused kernel, or ("math") as plain matmuls
    #: and a softmax.
    heads: Literal[1, 2, 4] = 1
    attention: Literal["flash", "math"] = "flash"
    #: Run under bf16 autocast.
    autocast: bool = False
    grad_mode: GradMode = "train"
    #: Number of optimizer steps, and of forward-backward pairs before each.
    steps: Annotated[int, Meta(ge=1, le=5)] = 1
    microbatches: Annotated[int, Meta(ge=1, le=3)] = 1
    optimizer: Optimizer = "sgd"
    loss_scaling: LossScaling = "none"
    clipping: Clipping = "none"
    lifecycle: Lifecycle = "none"
    checkpoint: AnyCheckpoint = "none"
    wraps: Wraps = "whole"
    compile: Compile = "none"
    #: Compile one graph for any number of rows.
    dynamic: bool = False
    fullgraph: bool = False
    #: Percentage of the activations that the compiler may save for backward.
    memory_budget: Literal[100, 50, 0] = 100
    #: "both": a rung on PyTorch's own kernels follows that on oneDNN's. "native": it replaces that
    #: one, if nothing is compiled.
    kernels: Kernels = "default"
    #: Number of threads for the kernels of a CPU.
    threads: Literal[1, 2, 4] = 1
    #: The events of the training; (): ``steps`` with ``microbatches`` each.
    events: Annotated[tuple[Event, ...], Meta(max_length=64)] = ()
    #: How a library's own layers are connected, and the number of layers in a chain.
    layout: Layout = "chain"
    depth: Annotated[int, Meta(ge=1, le=3)] = 1
    #: Parameters of a library's own layers are created in the narrow format.
    quantized_init: bool = False
    settings: Settings = Settings()
    sharding: Sharding = UNSHARDED

    def __post_init__(self) -> None:
        if why := unknown_model(self.model):
            raise ValueError(why)

    @property
    def layer(self) -> str:
        """The library's own layer that the model consists of; "" for a converted model."""
        return LIBRARY.get(self.model, "")

    @property
    def sharded(self) -> bool:
        """True if the model also runs on ranks."""
        return self.sharding != UNSHARDED

    @property
    def layers(self) -> int:
        """Number of a library's layers in the model."""
        return {"chain": self.depth, "twice": 1}.get(self.layout, 2)

    @property
    def calls(self) -> int:
        """Number of calls of a library's layers in one forward."""
        return {"chain": self.depth, "branch": 1}.get(self.layout, 2)

    @property
    def region(self) -> Literal["none"] | Wraps:
        """The part of the model that a checkpoint wraps; "none" without a checkpoint."""
        return "none" if self.checkpoint == "none" else self.wraps

    @property
    def checkpoint_by(self) -> Literal["library", "torch"]:
        """Whose checkpoint function a library's layers are recomputed by."""
        return "library" if self.checkpoint in get_args(Checkpoint) else "torch"

    @property
    def reentrant(self) -> bool:
        """True for a reentrant checkpoint, which runs a backward inside its own backward."""
        return self.checkpoint in ("reentrant", "by_torch_reentrant")

    @property
    def training(self) -> tuple[Event, ...]:
        """The events of the training, plain steps included."""
        return self.events or plain_training(self.steps, self.microbatches, self.grad_mode)

    @property
    def trains(self) -> bool:
        """True if there is a backward."""
        return any(isinstance(event, Backward) for event in self.training)

    @property
    def optimizes(self) -> bool:
        """True if the optimizer takes a step."""
        return any(isinstance(event, Step) for event in self.training)

    @property
    def sums_forwards(self) -> bool:
        """True if one backward goes through several forwards."""
        return any(isinstance(event, Backward) and len(event.of) > 1 for event in self.training)

    @property
    def narrowed(self) -> frozenset[int]:
        """Numbers of the forwards that run under autocast."""
        forwards = [
            self.autocast or narrows(event, regions)
            for event, regions in with_regions(self.training)
            if isinstance(event, Forward)
        ]
        return frozenset(i for i, narrow in enumerate(forwards) if narrow)

    @property
    def direct(self) -> bool:
        """True for a single linear that runs once: its tensors are those of the case, and every
        rule applies."""
        return self.model == "linear" and not self.scheduled and not self.autocast

    @property
    def parameters(self) -> Mapping[str, str]:
        """Name of a parameter in the model -> name of its tensor in the case, where they differ:
        only for a single linear."""
        return {"proj.weight": "weight", "proj.bias": "bias"} if self.direct else {}

    @property
    def gradients(self) -> Mapping[str, str]:
        """The same for the gradients of these parameters -> their names in a trace."""
        return {f"{name}.grad": f"grad_{own}" for name, own in self.parameters.items()}

    @property
    def single_operator(self) -> bool:
        """True for a model that is a single operator other than a linear."""
        return self.model in MODELS and MODELS[self.model].kind == "operator"

    @property
    def native(self) -> bool:
        """True if all GEMMs run on PyTorch's own kernels. A compiled graph is compared with eager
        on oneDNN's, so this is False for a Spec that is compiled."""
        return self.kernels == "native" and self.compile == "none"

    @property
    def scheduled(self) -> bool:
        """True if more than one forward and backward may run: several steps or microbatches, or
        events."""
        return self.steps > 1 or self.microbatches > 1 or bool(self.events)

    @property
    def width(self) -> int:
        """Number of output features."""
        return self.n if self.model in MODELS and MODELS[self.model].wide else self.k

    @property
    def tokens(self) -> int:
        """Number of rows of the flattened input."""
        return self.m * (self.batch or 1)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.m, self.k) if self.batch else (self.m, self.k)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.input_shape[:-1], self.width)


class Spike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One planted element. ``row`` and ``col`` wrap around; ``bits`` is the pattern of an fp32."""

    tensor: TensorName
    row: Annotated[int, Meta(ge=0, le=1 << 20)]
    col: Annotated[int, Meta(ge=0, le=1 << 20)]
    bits: HexBits


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Determines every tensor. All elements of a tensor are multiplied by 2^exponent, which is a
    field for each tensor."""

    regime: Regime = "wild"
    #: The GEMM whose operands are ladder data.
    gemm: Gemm = "output"
    values: ValueClass = "gaussian"
    seed: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    input_exponent: Exponent = 0
    weight_exponent: Exponent = 0
    grad_exponent: Exponent = 0
    spikes: Annotated[tuple[Spike, ...], Meta(max_length=16)] = ()
    #: Selects the permutation, scaling or other transformation that a relation applies; -1: the
    #: seed selects it.
    variant: Annotated[int, Meta(ge=-1, le=(1 << 32) - 1)] = -1

    @property
    def choice(self) -> int:
        """The number by which relations select their transformation."""
        return self.seed if self.variant < 0 else self.variant


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment: a Spec and the data it runs on."""

    spec: Spec
    data: DataSpec
    #: Cases that ran before it in the same process, if state that outlives a model matters.
    history: Annotated[tuple[Case, ...], Meta(max_length=64)] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if any(earlier.history for earlier in self.history):
            raise ValueError("a case of a history has none of its own: list them all in one")

    @property
    def id(self) -> str:
        """Short hash of Spec, data and history without defaults, so that a new field changes no
        id."""
        fields: list[Any] = [_given(self.spec), _given(self.data)]
        if self.history:
            fields.append([earlier.id for earlier in self.history])
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:12]

    @property
    def recipes(self) -> frozenset[str]:
        """Names of the recipes that the case and its history run."""
        return frozenset(case.spec.recipe for case in (self, *self.history))

    def reseeded(self, by: int) -> Case:
        """The same with other data: their seed is so much larger."""
        data = msgspec.structs.replace(self.data, seed=(self.data.seed + by) % 2**32)
        return msgspec.structs.replace(self, data=data)


def dump_case(case: Case) -> bytes:
    """Canonical JSON: sorted keys, no spaces, no fields that have their default."""
    return msgspec.json.encode(_of_case(case), order="sorted")


def _of_case(case: Case) -> dict[str, Any]:
    fields = {"data": _given(case.data), "schema": case.schema, "spec": _given(case.spec)}
    if case.history:
        fields["history"] = [_of_case(earlier) for earlier in case.history]
    return fields


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """``msgspec.structs.fields``, cached: it takes a millisecond to read the annotations."""
    return msgspec.structs.fields(struct)


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """The required fields, and those that differ from their defaults."""
    return {
        field.name: getattr(struct, field.name)
        for field in fields_of(type(struct))
        if field.required or getattr(struct, field.name) != field.default
    }


def load_case(raw: bytes) -> Case:
    """Parse a case strictly. Raises ValueError naming the field and what it must be."""
    if len(raw) > MAX_CASE_BYTES:
        raise ValueError(f"case file has {len(raw)} bytes; a case has at most {MAX_CASE_BYTES}")
    try:
        version = msgspec.json.decode(raw, type=_Versioned).schema
        if version > SCHEMA:
            raise ValueError(
                f"case has schema {version}, this one reads up to {SCHEMA}: update narrowfuzz"
            )
        if version < 1:
            raise ValueError(f"case has schema {version}: the first schema is 1")
        if version < 6:
            case = msgspec.convert(upgraded(msgspec.json.decode(raw)), Case)
        else:
            case = msgspec.json.decode(raw, type=Case)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a valid case: {error}{_known(str(error))}") from None
    except RecursionError:
        raise ValueError("not a valid case: nested too deeply") from None
    for one in (case, *case.history):
        _check_sizes(one.spec)
    return case


def _check_sizes(spec: Spec) -> None:
    """Raise ValueError if a size is larger than any that is drawn for a shipped model; a user's own
    model may be larger."""
    largest = LARGEST_OWN if title_of(spec.model) else LARGEST
    for name, size in (("m", spec.m), ("k", spec.k), ("n", spec.n)):
        if size > largest:
            raise ValueError(
                f"not a valid case: Expected `int` <= {largest}, got {size} - at `$.spec.{name}`"
            )


_NO_SUCH_VALUE = re.compile(r"Invalid enum value .* - at `\$\.(spec|data)\.(\w+)`\Z")


def _known(error: str) -> str:
    """Text that lists a field's valid values, if the error is about such a value; else ""."""
    found = _NO_SUCH_VALUE.search(error)
    if not found:
        return ""
    hints = get_type_hints({"spec": Spec, "data": DataSpec}[found[1]])
    values = get_args(hints.get(found[2]))
    return f"; known are {', '.join(map(str, values))}" if values else ""


class _Versioned(msgspec.Struct):
    schema: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


def compile_key(spec: Spec) -> str:
    """Hash of the part of a Spec whose cases share one built (and compiled) program.

    With static shapes that is the whole Spec; a dynamic graph serves any number of rows.
    """
    if spec.dynamic:
        spec = msgspec.structs.replace(spec, m=0)
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:12]
