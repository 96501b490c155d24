"""Spec, DataSpec and Case: plain data that names one experiment completely.

A case is strict JSON with a schema version. Nothing in it is imported or executed; special values
are bit patterns. The invariant: the same Case makes the same program and the same tensors on any
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
from narrowfuzz.models.catalog import LIBRARY, MODELS, title_of, unknown_model

#: 2 added models, a library's own layers and more rungs, 3 the variant, 4 ladder data, 5 events of
#: models; until then what happened to a library's layers was a record of its own. Older files mean
#: the same as ever.
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
#: ``selective`` keeps attention and every second matmul, and recomputes the rest.
Checkpoint = Literal["none", "full", "reentrant", "selective"]
#: A library's own layers may be recomputed by its own checkpoint, or by torch's.
AnyCheckpoint = Literal["none", "full", "reentrant", "selective", "by_torch", "by_torch_reentrant"]
#: Whose kernels multiply in eager runs: oneDNN's, as users have it, PyTorch's own, or each in turn.
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
#: Each of them as torch.optim calls it, and its options. Rates are powers of two: a step rounds as
#: little as it can.
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
#: torchao's, which compile their steps.
LOW_BIT: tuple[Optimizer, ...] = ("adamw_8bit", "adamw_4bit", "adamw_fp8", "adamw_8bit_rounded")
#: Who scales the loss, and skips a step whose gradients are not finite: nobody, torch's GradScaler,
#: or its definition, written out.
LossScaling = Literal["none", "grad_scaler", "by_hand"]
#: How gradients are clipped before each step: by their norm, by the largest of them (the norm of
#: order infinity), or each by itself.
Clipping = Literal["none", "norm", "norm_inf", "value"]
#: What happens to the converted model before its first run.
Lifecycle = Literal["none", "deepcopy", "reload"]
#: ``lattice``: sums that every accumulator gets exactly. ``ladder``: sums that tell accumulators
#: apart. ``wild``: one of the value classes.
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
#: By what a recipe says that it can be laid out over ranks, which may communicate "codes".
Shards = Literal["fsdp", "tensor", "codes", "context", "classes"]


class Sharding(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How a model is laid out over ranks. Defaults are one process, and the simplest of each."""

    #: Ranks that share the rows, whose parameters FSDP shards; 0: no FSDP. Of a library's own
    #: layers, ranks that train by themselves on rows of their own, and share maxima.
    data: Annotated[int, Meta(ge=0, le=4)] = 0
    #: So many groups of these ranks each shard all parameters, and have the same; 0: one does.
    replicas: Annotated[int, Meta(ge=0, le=4)] = 0
    #: These ranks are replicas that each have all parameters, as DistributedDataParallel trains
    #: them: as it is called by default, with gradients that are views of its buckets, with a static
    #: graph, or looking for parameters that take no part; "": FSDP shards them.
    ddp: Literal["", "plain", "views", "static", "unused"] = ""
    #: So many in a row of these ranks share the experts: each has some, and gets the rows that go
    #: to these; 0: every rank has all of them.
    experts: Annotated[int, Meta(ge=0, le=4)] = 0
    #: Ranks that share each linear, or each expert where there are ``experts``; 0: no tensor
    #: parallelism.
    tensor: Annotated[int, Meta(ge=0, le=4)] = 0
    #: Whether a single linear is shared by its output features or by its input features.
    style: Literal["colwise", "rowwise"] = "colwise"
    #: torchao's own styles, which communicate codes.
    narrow_styles: bool = False
    #: Activations between tensor-parallel linears are sharded by rows.
    sequence: bool = False
    #: False: layers return distributed tensors.
    local_output: bool = True
    #: FSDP gathers parameters, codes of them, or codes whose scales are computed after each step.
    gathers: Literal["values", "codes", "precomputed"] = "values"
    #: FSDP gathers all parameters at once, or those of each region, or linear, by themselves; DDP
    #: adds up all gradients at once, or each parameter's by itself.
    units: Literal["whole", "each"] = "whole"
    #: FSDP adds gradients in fp32, whatever they are.
    reduces_fp32: bool = False
    #: FSDP divides the sum of gradients by the number of ranks.
    averages: bool = True
    #: What FSDP communicates is added alone; it divides by itself.
    forces_sums: bool = False
    #: Ranks that are processes run it, too.
    processes: bool = False
    #: The model so many times in a row, as stages of a pipeline; 0: no pipeline.
    stages: Annotated[int, Meta(ge=0, le=4)] = 0
    #: The order of a pipeline's microbatches; interleaved, each rank has two stages.
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    #: Ranks that share the rows of each sequence, and pass on its keys and values; 0: none do.
    context: Annotated[int, Meta(ge=0, le=4)] = 0
    #: How these go around: gathered at once, or from one rank to the next.
    rotates: Literal["allgather", "alltoall"] = "allgather"
    #: Ranks that share the classes of a loss; 0: none do.
    classes: Annotated[int, Meta(ge=0, le=4)] = 0
    #: After the first step its state is saved, and another model loads it: laid out the same, on
    #: one data-parallel rank less, with data- and tensor-parallel ranks swapped, with half as many
    #: that share experts, or on each rank by itself. "early": the same, before the first step.
    resumes: Literal["", "same", "early", "fewer", "swapped", "regrouped", "alone"] = ""

    def __str__(self) -> str:
        """Its ranks, and the fields that are not as simple as they may be."""
        own = {name: getattr(self, name) for name in self.__struct_fields__}
        return ", ".join(f"{k}={v}" for k, v in own.items() if v != getattr(ALONE, k)) or "alone"

    @property
    def ranks(self) -> int:
        """How many there are; 0: it is not sharded."""
        if self.stages:
            return self.stages // 2 if self.schedule == "interleaved" else self.stages
        if together := self.context or self.classes:
            return together
        return max(self.data, 1) * max(self.tensor, 1) if self.data or self.tensor else 0

    @property
    def groups(self) -> int:
        """Ranks with rows of their own, or groups of these where they share experts."""
        return max(self.data, 1) // max(self.experts, 1)

    @property
    def resumed(self) -> Sharding:
        """How it is laid out where it resumes: on fewer ranks each has all experts."""
        plain: dict[str, Any] = {"replicas": 0, "ddp": "", "experts": 0}
        ranks = {
            "fewer": {"data": self.data - 1, **plain},
            "swapped": {"data": self.tensor, "tensor": self.data, **plain},
            "regrouped": {"experts": max(self.experts // 2, 1)},
            "alone": {"data": 0, "tensor": 0, **plain},
        }
        return msgspec.structs.replace(self, **ranks.get(self.resumes, {}))


ALONE = Sharding()
#: The most rows, features or token ids of a case of our models, and of a user's, which has the
#: sizes that it was built with.
LARGEST, LARGEST_OWN = 4096, 1 << 20
Dim = Annotated[int, Meta(ge=0, le=LARGEST_OWN)]
Exponent = Annotated[int, Meta(ge=-60, le=60)]
HexBits = Annotated[str, Meta(pattern=r"^0x[0-9a-f]{8}\Z")]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that shapes the program. Defaults are the simplest value of each field."""

    recipe: str
    #: Which of the recipe's code paths runs; "" is the recipe's first.
    backend: str = ""
    #: One of ``MODELS``, a user's own among them once it is registered, or of ``LIBRARY``.
    model: str = "linear"
    #: Rows per batch entry (M), in_features or model width (K), out_features, hidden width or
    #: vocabulary (N).
    m: Dim = 32
    k: Dim = 32
    n: Dim = 32
    #: 0: the input is [m, k]. Otherwise [batch, m, k].
    batch: Annotated[int, Meta(ge=0, le=64)] = 0
    bias: bool = False
    dtype: Dtype = "bf16"
    input_layout: InputLayout = "contiguous"
    grad_layout: GradLayout = "contiguous"
    #: How each parameter lies in memory: "strided" is every second element of a larger tensor.
    weight_layout: InputLayout = "contiguous"
    #: Attention heads; attention runs on the fused kernel or as plain matmuls and a softmax.
    heads: Literal[1, 2, 4] = 1
    attention: Literal["flash", "math"] = "flash"
    #: Run under bf16 autocast.
    autocast: bool = False
    grad_mode: GradMode = "train"
    #: Optimizer steps, and forward-backward pairs before each of them.
    steps: Annotated[int, Meta(ge=1, le=5)] = 1
    microbatches: Annotated[int, Meta(ge=1, le=3)] = 1
    optimizer: Optimizer = "sgd"
    loss_scaling: LossScaling = "none"
    clipping: Clipping = "none"
    lifecycle: Lifecycle = "none"
    checkpoint: AnyCheckpoint = "none"
    wraps: Wraps = "whole"
    compile: Compile = "none"
    #: One graph for any number of rows.
    dynamic: bool = False
    fullgraph: bool = False
    #: Percent of the activations that the compiler may keep for backward.
    memory_budget: Literal[100, 50, 0] = 100
    #: PyTorch's own kernels have a rung behind that of oneDNN's (``both``) or in its place.
    kernels: Kernels = "default"
    #: Threads that a CPU's kernels share their work between.
    threads: Literal[1, 2, 4] = 1
    #: What happens to a model, event by event; (): ``steps`` of ``microbatches``.
    events: Annotated[tuple[Event, ...], Meta(max_length=64)] = ()
    #: How a library's own layers follow each other, and how many there are of a chain.
    layout: Layout = "chain"
    depth: Annotated[int, Meta(ge=1, le=3)] = 1
    #: Their parameters are made in the narrow format.
    quantized_init: bool = False
    settings: Settings = Settings()
    sharding: Sharding = ALONE

    def __post_init__(self) -> None:
        if why := unknown_model(self.model):
            raise ValueError(why)

    @property
    def layer(self) -> str:
        """The library's own layer that the model is made of; "" where a model is converted."""
        return LIBRARY.get(self.model, "")

    @property
    def sharded(self) -> bool:
        """True where it runs on several ranks, too."""
        return self.sharding != ALONE

    @property
    def layers(self) -> int:
        """How many of a library's layers the model has."""
        return {"chain": self.depth, "twice": 1}.get(self.layout, 2)

    @property
    def calls(self) -> int:
        """Calls of a library's layers in one forward."""
        return {"chain": self.depth, "branch": 1}.get(self.layout, 2)

    @property
    def region(self) -> Literal["none"] | Wraps:
        """What a checkpoint wraps, if there is one."""
        return "none" if self.checkpoint == "none" else self.wraps

    @property
    def checkpoint_by(self) -> Literal["library", "torch"]:
        """Whose checkpoint function it is."""
        return "library" if self.checkpoint in get_args(Checkpoint) else "torch"

    @property
    def reentrant(self) -> bool:
        """True where a backward runs inside of the checkpoint's own."""
        return self.checkpoint in ("reentrant", "by_torch_reentrant")

    @property
    def training(self) -> tuple[Event, ...]:
        """What happens to a model, event by event."""
        return self.events or plain_training(self.steps, self.microbatches, self.grad_mode)

    @property
    def trains(self) -> bool:
        """True where there is a backward."""
        return any(isinstance(event, Backward) for event in self.training)

    @property
    def optimizes(self) -> bool:
        """True where the optimizer takes a step."""
        return any(isinstance(event, Step) for event in self.training)

    @property
    def sums_forwards(self) -> bool:
        """True where one backward goes through several forwards."""
        return any(isinstance(event, Backward) and len(event.of) > 1 for event in self.training)

    @property
    def narrowed(self) -> frozenset[int]:
        """The forwards, by number, that run under autocast."""
        forwards = [
            self.autocast or narrows(event, regions)
            for event, regions in with_regions(self.training)
            if isinstance(event, Forward)
        ]
        return frozenset(i for i, narrow in enumerate(forwards) if narrow)

    @property
    def direct(self) -> bool:
        """True for one linear, run once: its tensors are the case's, and every rule applies."""
        return self.model == "linear" and not self.scheduled and not self.autocast

    @property
    def parameters(self) -> Mapping[str, str]:
        """What tensors of the case are called that its model calls otherwise: a single linear's."""
        return {"proj.weight": "weight", "proj.bias": "bias"} if self.direct else {}

    @property
    def gradients(self) -> Mapping[str, str]:
        """What the gradients of these are called in a trace."""
        return {f"{name}.grad": f"grad_{own}" for name, own in self.parameters.items()}

    @property
    def alone(self) -> bool:
        """True for one operator that is no linear."""
        return self.model in MODELS and MODELS[self.model].kind == "operator"

    @property
    def native(self) -> bool:
        """True where PyTorch's own kernels alone multiply: a graph is compared with oneDNN's."""
        return self.kernels == "native" and self.compile == "none"

    @property
    def scheduled(self) -> bool:
        """True where more than one forward and backward runs."""
        return self.steps > 1 or self.microbatches > 1 or bool(self.events)

    @property
    def width(self) -> int:
        """Features of the output."""
        return self.n if self.model in MODELS and MODELS[self.model].wide else self.k

    @property
    def tokens(self) -> int:
        """Rows of the flattened input."""
        return self.m * (self.batch or 1)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.m, self.k) if self.batch else (self.m, self.k)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.input_shape[:-1], self.width)


class Spike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One planted element; ``row`` and ``col`` wrap around, ``bits`` are of an fp32."""

    tensor: TensorName
    row: Annotated[int, Meta(ge=0, le=1 << 20)]
    col: Annotated[int, Meta(ge=0, le=1 << 20)]
    bits: HexBits


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Makes every tensor. All elements of a tensor are multiplied by 2^exponent of that tensor."""

    regime: Regime = "wild"
    #: Which GEMM a ladder is laid for.
    gemm: Gemm = "output"
    values: ValueClass = "gaussian"
    seed: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    input_exponent: Exponent = 0
    weight_exponent: Exponent = 0
    grad_exponent: Exponent = 0
    spikes: Annotated[tuple[Spike, ...], Meta(max_length=16)] = ()
    #: Which permutation, scaling or other transformation a relation tries; -1: as the seed says.
    variant: Annotated[int, Meta(ge=-1, le=(1 << 32) - 1)] = -1

    @property
    def choice(self) -> int:
        """What relations choose their transformation by."""
        return self.seed if self.variant < 0 else self.variant


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment: a Spec and the data it runs on."""

    spec: Spec
    data: DataSpec
    #: What ran before it in the same process, where that matters: state that outlives a model.
    history: Annotated[tuple[Case, ...], Meta(max_length=64)] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if any(earlier.history for earlier in self.history):
            raise ValueError("a case of a history has none of its own: list them all in one")

    @property
    def id(self) -> str:
        """Short hash of Spec, data and history, defaults left out: a later field changes no id."""
        fields: list[Any] = [_given(self.spec), _given(self.data)]
        if self.history:
            fields.append([earlier.id for earlier in self.history])
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:12]

    @property
    def recipes(self) -> frozenset[str]:
        """Names of the recipes that it and its history run."""
        return frozenset(case.spec.recipe for case in (self, *self.history))


def dump_case(case: Case) -> bytes:
    """Canonical JSON: keys in sorted order, no spaces, defaults left out."""
    return msgspec.json.encode(_of_case(case), order="sorted")


def _of_case(case: Case) -> dict[str, Any]:
    fields = {"data": _given(case.data), "schema": case.schema, "spec": _given(case.spec)}
    if case.history:
        fields["history"] = [_of_case(earlier) for earlier in case.history]
    return fields


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """As ``msgspec.structs.fields``, which reads the annotations anew each time: a millisecond."""
    return msgspec.structs.fields(struct)


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their defaults."""
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
    """A file may ask for no more of our models than is drawn of them."""
    largest = LARGEST_OWN if title_of(spec.model) else LARGEST
    for name, size in (("m", spec.m), ("k", spec.k), ("n", spec.n)):
        if size > largest:
            raise ValueError(
                f"not a valid case: Expected `int` <= {largest}, got {size} - at `$.spec.{name}`"
            )


_NO_SUCH_VALUE = re.compile(r"Invalid enum value .* - at `\$\.(spec|data)\.(\w+)`\Z")


def _known(error: str) -> str:
    """The values that a field has, where that is what the error is about."""
    found = _NO_SUCH_VALUE.search(error)
    if not found:
        return ""
    hints = get_type_hints({"spec": Spec, "data": DataSpec}[found[1]])
    values = get_args(hints.get(found[2]))
    return f"; known are {', '.join(map(str, values))}" if values else ""


class _Versioned(msgspec.Struct):
    schema: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


def compile_key(spec: Spec) -> str:
    """The part of a Spec whose cases share one built (and compiled) program.

    All of it where shapes are static; a dynamic graph serves any number of rows.
    """
    if spec.dynamic:
        spec = msgspec.structs.replace(spec, m=0)
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:12]
