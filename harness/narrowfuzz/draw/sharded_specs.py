"""Hypothesis strategies for sharded Specs: how a model is laid out over ranks.

Only what PyTorch and the recipe's library document as supported is drawn: rows that divide evenly
over the ranks, as data loaders distribute them, and parameters of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case.layout import LAYOUTS, MESH, MOST_RANKS, Layout, fitting, layouts
from narrowfuzz.case.layout.layout import SCHEDULES, up
from narrowfuzz.case.layout.mesh import trains_all, ways_of_ddp, why_not_fsdp
from narrowfuzz.case.sharding import Sharding, Shards
from narrowfuzz.case.spec import LOW_BIT, ModelName, Spec
from narrowfuzz.draw.choices import sampled
from narrowfuzz.draw.specs import scaled, specs
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import Recipe

#: Factors that may vary in a sharded Spec.
FACTORS = frozenset({"backend", "batch", "bias", "checkpoint", "dims", "dtype", "model", "shape"})
#: (data-parallel, tensor-parallel) ranks, repeated by weight. Layouts with a single rank are drawn
#: because only on these are the results of later steps judged to the bit.
_LAYOUTS = (
    (2, 0),
    (2, 0),
    (4, 0),
    (3, 0),
    (1, 0),
    (1, 0),
    (0, 2),
    (0, 2),
    (0, 4),
    (0, 1),
    (2, 2),
    (2, 2),
    (1, 2),
)
#: Optimizers, repeated by weight. DTensor has no fused SGD, and momentum before the first step is
#: not saved correctly (the known issue dcp-optimizer-begins-at-step-one).
_OPTIMIZERS = ("sgd", "sgd", "adamw", "adamw", "adamw_foreach", "adamw_fused")
#: (steps, microbatches), repeated by weight, if scales are precomputed for the next step.
_STEPPED = ((2, 1), (2, 1), (3, 1), (1, 1))
#: The same for DDP, which reduces what the microbatches before the last have accumulated.
_ACCUMULATED = ((1, 1), (2, 1), (1, 2), (2, 2))
#: Models besides the linear that are drawn on ranks.
SHARDABLE = tuple(name for name in MODELS if name != "linear" and layouts(name, get_args(Shards)))


@st.composite
def sharded_specs(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    models: tuple[ModelName, ...] = SHARDABLE,
    *,
    largest: int = 64,
    gpus: int = 0,
) -> Spec:
    """A Spec of one of ``recipes``, in a layout that its recipe supports, or that needs no support
    by a recipe. If ``gpus`` is not 0, ranks are processes, and each has a GPU to itself."""
    plain = [recipe for recipe in recipes if not recipe.models_of]
    most = gpus or MOST_RANKS
    allowed = models or ("linear",)
    rarely = [False] * 11 if any(map(MESH.takes, allowed)) else []
    for layout in LAYOUTS:
        able = [recipe for recipe in plain if layout.requires_shard in (None, *recipe.shards)]
        here = layout.drawn and (gpus or not layout.arm) and any(map(layout.takes, allowed))
        if here and able and draw(sampled(*rarely, True)):
            return draw(laid_out(layout, able, allowed, largest=largest, most=most))
    recipe = draw(sampled(*recipes))
    spec = draw(_meshed(recipe, models, largest, most))
    sharding = draw(_options(spec, recipe, most, processes=bool(gpus)))
    compiles = [False] * 9 + [True] * MODELS[spec.model].compiled
    schedules = _STEPPED if sharding.gathers == "precomputed" else SCHEDULES
    if sharding.ddp:
        schedules = _ACCUMULATED
    steps, microbatches = draw(sampled(*schedules))
    if steps > 1:
        sharding = draw(_resumed(spec, recipe, sharding, most))
    compiled, own = draw(sampled(*compiles)), MODELS[spec.model].own
    clippings = ["none"] * 3 + [*MESH.clips] * (not own)
    # low-bit states cannot be copied (the known issue low-bit-state-cannot-be-copied)
    low_bit = steps > 1 and not (compiled or sharding.resumes or recipe.models_of or own)
    narrow = [name for name in LOW_BIT if not (sharding.replicas and name.endswith("_rounded"))]
    optimizer = draw(sampled(*_OPTIMIZERS, *(narrow if low_bit else ())))
    if optimizer in LOW_BIT:  # with fewer elements on a rank, torchao stores plain moments
        spec = msgspec.structs.replace(spec, k=128, n=128)
    return fitting(
        msgspec.structs.replace(
            spec,
            sharding=sharding,
            loss_scaling=draw(scaled(spec.dtype, often=3)) if steps > 1 else "none",
            clipping=draw(sampled(*clippings)) if steps > 1 else "none",
            steps=steps,
            microbatches=microbatches,
            grad_mode="train",
            optimizer=optimizer,
            compile="aot_eager" if compiled else "none",
        )
    )


@st.composite
def _meshed(
    draw: st.DrawFn, recipe: Recipe, models: tuple[ModelName, ...], largest: int, most: int
) -> Spec:
    """A Spec whose sharding has numbers of data- and tensor-parallel ranks, and nothing else."""
    fit = (lay for lay in _LAYOUTS if max(lay[0], 1) * max(lay[1], 1) <= most)
    # users' own models are laid out by data parallelism alone
    none_else = bool(models) and all(MODELS[model].own for model in models)
    fit = (lay for lay in fit if _shards(recipe, *lay) and not (none_else and lay[1]))
    data, tensor = draw(sampled(*fit))
    recipe = replace(recipe, backends=tuple(b for b in recipe.backends if b not in recipe.eager))
    meshed = filter(MESH.takes, models)
    these = tuple(m for m in meshed if recipe.takes(m) and _laid(m, data, tensor))
    if with_experts := tuple(m for m in these if MODELS[m].experts):
        these = draw(sampled(*[these] * 3, with_experts))
    allowed = these or ("linear",)
    spec = draw(
        specs([recipe], vary=FACTORS, models=allowed, largest=largest, linears=not none_else)
    )
    if spec.dtype == "fp16":  # FSDP divides fp16 gradients before it adds them
        spec = msgspec.structs.replace(spec, dtype="bf16")
    if spec.reentrant and MODELS[spec.model].own:
        spec = msgspec.structs.replace(spec, checkpoint="full")
    if not _laid(spec.model, data, tensor):
        spec = msgspec.structs.replace(spec, model="linear")
    return msgspec.structs.replace(spec, sharding=Sharding(data=data, tensor=tensor))


def _laid(model: ModelName, data: int, tensor: int) -> bool:
    """True if the model can be laid out over these ranks. Experts can be split over one or two
    tensor-parallel ranks, if there are data-parallel ranks as well."""
    row = MODELS[model]
    return bool(not tensor or row.shared or (row.experts and data and tensor <= 2))


@st.composite
def _options(
    draw: st.DrawFn, spec: Spec, recipe: Recipe, most: int, *, processes: bool
) -> Sharding:
    """The Spec's sharding with drawn options of FSDP or DDP, tensor and expert parallelism."""
    data, tensor = spec.sharding.data, spec.sharding.tensor
    model = MODELS[spec.model]
    replicated = data and not (tensor or model.package)
    if replicated and draw(sampled(*[False] * (0 if why_not_fsdp(model) else 4), True)):
        able = [way for way in ways_of_ddp(model) if not (spec.reentrant and way == "unused")]
        return Sharding(
            data=data,
            replicas=data,
            ddp=draw(sampled(*able)),
            units=draw(sampled("whole", "each")),
            processes=processes or draw(sampled(*[False] * 9, True)),
        )
    codes = "codes" in recipe.shards and not model.gradients.elsewhere
    sequence = bool(tensor) and draw(sampled(False, True))
    narrow = codes and bool(tensor) and draw(sampled(False, True))
    replicas = draw(sampled(0, 0, 0, 2)) if data in (2, 4) and not tensor else 0
    sharing = _expert_group_sizes(
        MODELS[spec.model].experts, data, replicas, most // max(tensor, 1)
    )
    parted = (1, *sharing) if tensor and MODELS[spec.model].experts else ()
    averages = not data or draw(sampled(True, True, False))
    single = tensor and spec.model == "linear"
    parted_units = ["each"] * bool(model.units or not model.own)
    return Sharding(
        data=data,
        replicas=replicas,
        experts=draw(sampled(*(parted or (0, *sharing, *sharing)))),
        tensor=tensor,
        style=draw(sampled("colwise", "rowwise")) if single else "colwise",
        sequence=sequence,
        narrow_styles=narrow,
        local_output=not tensor or draw(sampled(True, True, False)),
        gathers=draw(sampled("values", "codes", "precomputed")) if data and codes else "values",
        units=draw(sampled("whole", *parted_units)) if data else "whole",
        reduces_fp32=bool(data) and draw(sampled(False, True)),
        averages=averages,
        forces_sums=bool(data) and averages and draw(sampled(False, False, False, True)),
        processes=processes or draw(sampled(*[False] * 9, True)),
    )


@st.composite
def _resumed(
    draw: st.DrawFn, spec: Spec, recipe: Recipe, sharding: Sharding, most: int
) -> Sharding:
    """The sharding with a drawn value of ``resumes``."""
    resumes = draw(sampled("", "", "", *_resumes(spec.model, recipe, sharding)))
    # from three to two, ranks load parts of shards; from two to one, the rank loads whole shards
    two = (sharding.data, sharding.groups, sharding.replicas, sharding.tensor) == (2, 2, 0, 0)
    three = two and resumes == "fewer" and most > 2 and _shards(recipe, 3, 0)
    ranks = draw(sampled(2, 3)) if three else sharding.data
    return msgspec.structs.replace(sharding, resumes=resumes, data=ranks)


@st.composite
def laid_out(
    draw: st.DrawFn,
    layout: Layout,
    recipes: Sequence[Recipe],
    models: tuple[ModelName, ...],
    *,
    largest: int,
    most: int,
) -> Spec:
    """A Spec in this layout, with drawn values of the fields in ``layout.drawn``."""
    able, linears = tuple(filter(layout.takes, models)), layout.takes("linear")
    spec = draw(specs(recipes, vary=FACTORS, models=able, largest=largest, linears=linears))
    chosen: dict[str, Any] = {}
    for names, choice in layout.drawn:
        made = {one: chosen | dict(zip(names, one, strict=True)) for one in choice}
        chosen = made[draw(sampled(*(o for o in choice if _sharding(made[o]).ranks <= most)))]
    spec = msgspec.structs.replace(
        spec,
        **{name: chosen[name] for name in chosen if name in Spec.__struct_fields__},
        sharding=_sharding(chosen),
        grad_mode="train",
        optimizer=draw(sampled(*_OPTIMIZERS, *["sgd_fused"] * bool(layout.scales))),
    )
    if spec.steps > 1:
        spec = msgspec.structs.replace(
            spec,
            loss_scaling=draw(scaled(spec.dtype, often=2)) if layout.scales else "none",
            clipping=draw(sampled("none", *layout.clips)),
        )
    compiles = [False] * 9 + [True] * MODELS[spec.model].compiled
    if layout.compiles and draw(sampled(*compiles)):
        spec = msgspec.structs.replace(spec, compile="aot_eager")
    return fitting(spec)


def _sharding(chosen: Mapping[str, Any]) -> Sharding:
    return Sharding(**{name: chosen[name] for name in chosen if name in Sharding.__struct_fields__})


def _shards(recipe: Recipe, data: int, tensor: int) -> bool:
    ranks_by_kind = {"fsdp": data, "tensor": tensor}
    few = not recipe.models_of or max(data, tensor) <= 2  # a package's own models are large
    return few and all(by in recipe.shards for by, ranks in ranks_by_kind.items() if ranks)


def _resumes(model: ModelName, recipe: Recipe, sharding: Sharding) -> tuple[str, ...]:
    """The values of ``Sharding.resumes`` that are possible with this sharding."""
    if MODELS[model].own:  # with a batch for each rank, there are always as many
        resumable = trains_all(MODELS[model]) and MODELS[model].saves_as_named
        return ("same", "early") if resumable else ()
    able = MODELS[model].shared and not MODELS[model].prescribed_sharding
    both = able and _shards(recipe, sharding.tensor, sharding.data) and sharding.gathers == "values"
    fewer = ("fewer",) if sharding.data > 1 and not (sharding.experts and sharding.tensor) else ()
    regrouped = ("regrouped",) if sharding.experts else ()
    return ("same", "early", "alone", *fewer, *regrouped, *(("swapped",) if both else ()))


def _expert_group_sizes(experts: int, data: int, replicas: int, most: int) -> tuple[int, ...]:
    """The numbers of consecutive ranks that may share the experts, with at most ``most``
    data-parallel ranks in all."""
    group = max(replicas, 1)
    return tuple(
        n for n in (2, 3, 4) if n <= experts and experts % n == 0 and up(data, n * group) <= most
    )
