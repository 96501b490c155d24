"""The models and jobs of a Spec that runs on ranks, and of the run in one process that it is
compared with. The layouts are defined in ``case/layout/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from torch import nn

from narrowfuzz.arms.census import converted_by
from narrowfuzz.arms.jobs import job_of
from narrowfuzz.arms.model_names import layer_names, parameter_shapes, ties
from narrowfuzz.arms.unit_inputs import add_up_by_unit
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.layout.mesh import MESH
from narrowfuzz.case.sharding import UNSHARDED, Sharding
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.experts import ExpertParallelReference
from narrowfuzz.play.job import Event, Job
from narrowfuzz.play.names import name_of
from narrowfuzz.recipe.recipe import Recipe

#: The name prefixes where there is a single model: one, which is empty.
_ONE_MODEL = ("",)
#: Buffers are not compared: each rank has its own, which its own rows change.
_NO_BUFFERS: tuple[str, ...] = ()


def job_on_ranks(spec: Spec, arm: Arm, device: str) -> Job:
    """The training of each rank."""
    job, scales = job_of(spec, arm, device), layout_of(spec).scales
    if job.loss_scaling == "grad_scaler" and scales:
        job = replace(job, loss_scaling=scales)
    tied, layout = _filled_from(spec, _stages(spec)), laid_out(spec)
    return replace(job, tied=tied, layout=layout, buffers=_NO_BUFFERS)


def job_alone(spec: Spec, device: str) -> Job:
    """The same training in one process, on the rows of one data-parallel rank or, where ranks share
    experts, on those of all these ranks."""
    own = spec if copies_of(spec) else single_process_spec(spec)
    job = job_of(own, EAGER, device)
    job = replace(job, tied=_filled_from(spec, prefixes(spec)), buffers=_NO_BUFFERS)
    if spec.sharding.experts:  # the caller has already rotated each rank's rows
        job = replace(job, events=tuple(map(_without_row_shift, job.events)))
    return job


def _without_row_shift(event: Event) -> Event:
    name, *how = event
    return (name, how[0], 0, *how[2:]) if name == "forward" else event


def _filled_from(spec: Spec, models: tuple[str, ...]) -> dict[str, str]:
    """Parameter -> name of the tensor with which it is filled, where that differs: several models
    all start with the same values."""
    if models == _ONE_MODEL:
        return ties(spec)
    return {f"{before}{name}": name for before in models for name in parameter_shapes(spec)}


def prefixes(spec: Spec) -> tuple[str, ...]:
    """The name prefix of each model that one process trains together with others: the stages of a
    pipeline, or the models of ranks that share experts."""
    return tuple(f"models.{rank}." for rank in range(spec.sharding.experts)) or _stages(spec)


def _stages(spec: Spec) -> tuple[str, ...]:
    return tuple(f"{copy}." for copy in range(copies_of(spec))) or _ONE_MODEL


def copies_of(spec: Spec) -> int:
    """The number of copies of the model that form the stages of a pipeline; 0: no pipeline."""
    copies = layout_of(spec).copies
    return 0 if copies is None else copies(spec.sharding)


def made(spec: Spec, recipe: Recipe, device: str) -> nn.Module:
    """The converted model; for a pipeline, all its stages in sequence."""

    def build() -> nn.Module:
        return MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)

    copies = copies_of(spec)
    model = layout_of(spec).player.chained(build, copies) if copies else build()
    return converted_by(recipe, model, spec)  # type: ignore[no-any-return]


def reference_model(spec: Spec, recipe: Recipe, device: str) -> nn.Module:
    """The converted model that one process trains for comparison; where ranks share experts, one
    model for each rank, in a single module."""
    if copies_of(spec):
        return made(spec, recipe, device)
    experts, parts = spec.sharding.experts, max(spec.sharding.tensor, 1)
    # a recipe may convert experts otherwise where ranks share them
    alone = msgspec.structs.replace(single_process_spec(spec), sharding=Sharding(experts=experts))
    model = made(alone, recipe, device)
    if experts:
        return ExpertParallelReference(model, experts, parts)
    if layout_of(spec) is MESH and spec.sharding.data and not spec.sharding.ddp:
        # a package's own model lays itself out
        return model if hasattr(model, "shard") else add_up_by_unit(model, laid_out(spec).units)
    return model


def linear_specs_on_ranks(spec: Spec) -> tuple[Spec, ...]:
    """Specs of the linears that a rank may run, on the rows of its data-parallel group: with K and
    N whole, and with K or N divided by the number of tensor-parallel ranks, both of the first
    layout and of the one on which the training resumes."""
    found = []
    for layout in dict.fromkeys((spec.sharding, spec.sharding.resumed)):
        own = single_process_spec(msgspec.structs.replace(spec, sharding=layout))
        found.append(own)
        for name in "kn":
            cut = getattr(own, name) // max(layout.tensor, 1)
            found.append(msgspec.structs.replace(own, **{name: cut}))
    return tuple(dict.fromkeys(found))


def single_process_spec(spec: Spec) -> Spec:
    """The Spec of a run in one process on the rows of one data-parallel rank; where ranks share
    experts, on the rows of all these ranks."""
    size = "batch" if spec.batch else "m"
    rows = getattr(spec, size) // spec.sharding.groups
    return msgspec.structs.replace(spec, sharding=UNSHARDED, checkpoint="none", **{size: rows})


def tensors_of_group(spec: Spec, tensors: Mapping[str, F32], group: int) -> dict[str, F32]:
    """The tensors for ``single_process_spec``: all parameters, and the rows of inputs and output
    gradients of this data-parallel group."""

    def cut(name: str, x: F32) -> F32:
        rows = name_of(name).kind in ("input", "grad_output")
        return np.split(x, spec.sharding.groups)[group] if rows else x

    return {name: cut(name, x) for name, x in tensors.items()}


def laid_out(spec: Spec) -> Any:
    """The layout's data that each rank needs."""
    tied = {name.rpartition(".")[0] for name in ties(spec)}  # must not become units of their own
    return layout_of(spec).placement(spec, [name for name in layer_names(spec) if name not in tied])
