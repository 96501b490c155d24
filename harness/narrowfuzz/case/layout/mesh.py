"""The layout of data parallelism (FSDP or DDP), tensor parallelism, expert parallelism, and their
combinations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from narrowfuzz.case.layout.layout import Layout, up
from narrowfuzz.case.sharding import DDP, UNSHARDED, Sharding
from narrowfuzz.case.spec import ModelName, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Model
from narrowfuzz.play.job import Mesh

#: (data-parallel, tensor-parallel) ranks that a case is tried with when it is made simpler.
_RANKS = ((1, 0), (0, 1), (2, 0), (0, 2), (2, 2))


def _takes(model: ModelName) -> bool:
    row = MODELS[model]
    return not why_alone(row) if row.own else not (row.random or row.kind == "operator")


def why_alone(model: Model) -> str:
    """Why ranks cannot train a user's own model, as the end of a sentence; "" if they can."""
    if model.random:
        return "it draws random numbers, and each rank draws others"
    if model.remembers or model.changing_parameters:
        return "what it computes depends on the forwards before, which are each rank's own"
    if model.fixed.get("dtype") == "fp16":
        return "its parameters are fp16, whose gradients FSDP divides before it adds them"
    if model.gradients.dtypes:
        name, dtype = next(iter(model.gradients.dtypes.items()))
        other = dtype or "of another dtype"
        return f"its parameters have several dtypes: {name} is {other}"
    return model.alone


def _fit(spec: Spec) -> Spec:
    """The Spec with rows, and under tensor parallelism features, that divide evenly over its ranks,
    and with the fields of its sharding that ``Model.prescribed_sharding`` sets."""
    sharding = spec.sharding
    for by, given in MODELS[spec.model].prescribed_sharding.items():
        if getattr(sharding, by):
            sharding = msgspec.structs.replace(sharding, **given)
    if sharding.experts:
        shared = _next_divisor(MODELS[spec.model].experts, sharding.experts)
        data = up(sharding.data, max(shared, 1) * max(sharding.replicas, 1))
        sharding = msgspec.structs.replace(sharding, experts=shared, data=data)
        # only groups of NCCL can reduce with a factor; others only add
        sums = sharding.forces_sums or any(_divided(lay) for lay in (sharding, sharding.resumed))
        sharding = msgspec.structs.replace(sharding, forces_sums=sums)
    if MODELS[spec.model].own:
        return msgspec.structs.replace(spec, sharding=sharding, **_own_batches(spec))
    layouts = sharding, sharding.resumed
    data = math.lcm(*(max(layout.data, 1) for layout in layouts))
    tensor = math.lcm(*(max(layout.tensor, 1) for layout in layouts))
    inside = tensor if sharding.sequence else 1
    sizes: dict[str, Any] = {}
    if spec.batch:
        sizes = {"batch": up(spec.batch, data), "m": up(spec.m, inside)}
    else:
        sizes = {"m": up(spec.m, data * inside)}
    if tensor > 1:
        # a local tensor is taken for an even piece of a feature dimension
        for name in ("k", "n"):
            sizes[name] = up(getattr(spec, name), tensor)
    return msgspec.structs.replace(spec, sharding=sharding, **sizes)


def _own_batches(spec: Spec) -> dict[str, int]:
    """The rows of a user's own model: for each data-parallel rank a batch like its example."""
    given = MODELS[spec.model].fixed
    size = "batch" if given["batch"] else "m"
    return {"batch": given["batch"], "m": given["m"], size: given[size] * spec.sharding.groups}


def _divided(sharding: Sharding) -> bool:
    """True if FSDP shards experts over several groups of ranks that share experts, so that the sum
    over these groups must be divided by the number of all data-parallel ranks, which is larger."""
    group = sharding.experts * max(sharding.replicas, 1)
    return bool(sharding.experts) and sharding.data > group


def _next_divisor(experts: int, ranks: int) -> int:
    """The smallest number of ranks, at least ``ranks``, that divides the number of experts; 0 if
    there is none."""
    return next((n for n in range(ranks, experts + 1) if experts % n == 0), 0)


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding, model = spec.sharding, MODELS[spec.model]
    for by, ranks in (("fsdp", sharding.data), ("tensor", sharding.tensor)):
        if ranks and by not in shards:
            yield f"{spec.recipe} is not laid out by {by}"
    narrow = sharding.gathers != "values" or sharding.narrow_styles
    if narrow and "codes" not in shards:
        yield f"{spec.recipe} communicates no codes: leave gathers and narrow_styles"
    if narrow and (read := model.gradients.elsewhere):
        yield f"codes are for linears alone, and functions use {read[0]}, too: leave gathers"
    if sharding.experts and not model.experts:
        able = ", ".join(name for name, other in MODELS.items() if other.experts)
        yield f"ranks share no experts of {spec.model}; they do of {able}"
    if sharding.experts and sharding.tensor > 2:
        yield f"1 or 2 tensor-parallel ranks share each expert, not {sharding.tensor}"
    if sharding.experts and not sharding.data:
        yield "data-parallel ranks share experts, so data is 1 or more"
    if sharding.ddp and model.package:
        yield f"ddp is '' with {spec.model}: {model.package} shards it by FSDP"
    elif model.own and not sharding.ddp and (why := why_not_fsdp(model)):
        yield f"FSDP does not shard {model.title}, as {why}: give ddp"
    elif sharding.ddp and sharding != _of_ddp(sharding):
        yield f"with ddp the sharding is {_of_ddp(sharding)}, not {sharding}"
    if sharding.ddp and sharding.ddp not in (ways := ways_of_ddp(model)):
        yield f"{_without_gradient(model)}: give ddp {' or '.join(map(repr, ways))}"
    if sharding.resumes and not model.saves_as_named:
        yield f"the state_dict of {model.title} has names of no parameters: give resumes ''"
    if sharding.resumes and not trains_all(model):  # its optimizer expects a state that is not made
        yield f"{_without_gradient(model)}: give resumes ''"
    if model.own and spec.checkpoint == "reentrant":
        # in one process, too, a reentrant recompute may hand gradients on in another layout
        yield "ranks recompute a user's own model by checkpoints that are not reentrant"
    if model.own and sharding.resumed.groups != sharding.groups:
        yield f"resumes {sharding.resumes!r} gives {model.title} batches of another size"
    if sharding.ddp == "unused" and spec.checkpoint == "reentrant":
        yield "ddp 'unused' (find_unused_parameters) takes no reentrant checkpoint; 'static' does"
    if sharding.replicas > 1 and spec.optimizer.endswith("_rounded"):
        yield (
            f"optimizer {spec.optimizer!r} rounds stochastically, on each replica otherwise: give "
            f"{spec.optimizer.removesuffix('_rounded')!r}"
        )
    if sharding.data % (group := max(sharding.experts, 1) * max(sharding.replicas, 1)):
        yield (
            f"data is {sharding.data}, no multiple of {group}: of {sharding.replicas or 1} "
            f"replicas times {sharding.experts or 1} ranks that share experts"
        )
    if sharding.tensor and not (model.shared or sharding.experts):
        able = ", ".join(name for name, other in MODELS.items() if other.shared)
        yield f"tensor parallelism shares no linears of {spec.model}; it does of {able}" + (
            ", and experts of this model where experts is 1 or more" if model.experts else ""
        )


def why_not_fsdp(model: Model) -> str:
    """Why FSDP cannot shard a user's own model; "" if it can."""
    if model.unshardable:
        return model.unshardable
    if model.reached_by_chance:  # ranks then reduce other gradients, and wait for each other
        return _without_gradient(model)
    # a second backward finds parameters that FSDP has freed after the first
    return "its forward differentiates" if model.gradients.twice else ""


def trains_all(model: Model) -> bool:
    """True if all trainable parameters of a user's own model get gradients with any input."""
    return not (model.unreached or model.reached_by_chance)


def ways_of_ddp(model: Model) -> Sequence[DDP]:
    """The values of ``Sharding.ddp`` with which DDP trains a model, the most usual one first."""
    if model.reached_by_chance:
        return ("unused",)
    return ("static", "unused") if model.unreached else ("plain", "views", "static", "unused")


def _without_gradient(model: Model) -> str:
    if model.reached_by_chance:
        return f"{model.reached_by_chance[0]} gets a gradient with some inputs only"
    return f"{model.unreached[0]} gets no gradient"


def _of_ddp(sharding: Sharding) -> Sharding:
    """The sharding with all other fields at their defaults but those that DDP allows, and with as
    many replicas as data-parallel ranks."""
    names = "data", "ddp", "units", "processes", "resumes"
    own = {name: getattr(sharding, name) for name in names}
    return Sharding(**own, replicas=sharding.data)


def _called_with(sharding: Sharding) -> dict[str, Any]:
    """Keyword arguments of DistributedDataParallel. A bucket of 2^-20 MB is full with any
    parameter, so each is reduced separately."""
    options: dict[str, dict[str, Any]] = {
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }
    buckets = {"bucket_cap_mb": 2.0**-20} if sharding.units == "each" else {}
    return options.get(sharding.ddp, {}) | buckets


def _simpler(sharding: Sharding) -> Iterator[tuple[str, Mapping[str, Any]]]:
    own = sharding
    if own.experts:
        yield "all experts on each rank", {"experts": 0, "tensor": 0}
    for data, tensor in _RANKS:
        smaller = max(data, 1) * max(tensor, 1) <= own.ranks and (data <= own.data or not data)
        if smaller and (data, tensor) != (own.data, own.tensor) and (tensor <= own.tensor):
            yield (
                f"{data}x{tensor} ranks",
                {
                    "data": data,
                    "tensor": tensor,
                    "experts": min(own.experts, data),
                    "replicas": data if own.ddp else 0,
                    "ddp": own.ddp if data else "",
                },
            )
    if own.ddp:
        yield "FSDP", {"ddp": "", "replicas": 0}
    if own.ddp not in ("", "plain"):
        yield "DDP as it is by default", {"ddp": "plain"}
    elsewhere = "data", "tensor", "experts", "ddp", *(("replicas",) if own.ddp else ())
    for name in Sharding.__struct_fields__:
        value = getattr(UNSHARDED, name)
        if name not in elsewhere and getattr(own, name) != value:
            yield f"sharding {name}", {name: value}


def _placement(spec: Spec, linears: Sequence[str]) -> Mesh:
    sharding, model = spec.sharding, MODELS[spec.model]
    return Mesh(
        sharding.data,
        sharding.tensor,
        rows=(spec.batch or spec.m,) + ((spec.m,) if spec.batch else ()),
        widths={"input": 1 if model.takes_ids else spec.k, "grad_output": spec.width},
        cuts=_cuts(spec),
        styles=model.styles(spec),
        units=(*_units(model, linears), "") if sharding.units == "each" else ("",),
        narrow_styles=sharding.narrow_styles,
        sequence=sharding.sequence,
        local_output=sharding.local_output,
        reduces="float32" if sharding.reduces_fp32 else "",
        averages=sharding.averages,
        precomputes=sharding.gathers == "precomputed",
        forces_sums=sharding.forces_sums or not sharding.averages,
        replicas=sharding.replicas,
        experts=sharding.experts,
        ddp=_called_with(sharding) if sharding.ddp else None,
    )


def _units(model: Model, linears: Sequence[str]) -> Sequence[str]:
    """The submodules that FSDP gathers one by one, besides the rest of the model."""
    return model.units if model.own else model.regions or linears


def _cuts(spec: Spec) -> dict[str, int]:
    """The dimension along which tensor parallelism splits the input and the output gradient; 0:
    they are not split."""
    sharding, model = spec.sharding, MODELS[spec.model]
    styles, rows = (*model.styles(spec).values(),) or ("",), -2 if sharding.sequence else 0
    cuts = {
        # token ids are not split
        "input": 0 if model.takes_ids else -1 if styles[0] == "rowwise" else rows,
        "grad_output": -1 if styles[-1] == "colwise" else rows,
    }
    return cuts if sharding.tensor else dict.fromkeys(cuts, 0)


MESH = Layout(
    "mesh",
    lambda sharding: True,
    _takes,
    _fit,
    _objections,
    _simpler,
    _placement,
    processes=True,
    scales="grad_scaler",
    clips=("norm", "norm_inf"),
    follows_steps=True,
    # the sum of an expert's two parts is the same in either order
    cuts_sums=lambda sharding: sharding.tensor > 1 and not sharding.experts,
)
