"""How a Spec is laid out over ranks, and what of it one process runs for comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import numpy as np
from torch import nn

from narrowfuzz.arms.jobs import job_of
from narrowfuzz.arms.zoo import layer_names, parameter_shapes, ties
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import ALONE, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.context import play_context
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.job import Context, Job, Mesh, Pipeline, Resumed
from narrowfuzz.play.names import name_of
from narrowfuzz.play.pipeline import chained, play_pipeline
from narrowfuzz.play.player import Trace
from narrowfuzz.play.resumed import play_resumed
from narrowfuzz.play.sharded import play_sharded
from narrowfuzz.recipe.recipe import Recipe

#: What plays a training that is laid out so.
PLAYERS: dict[type, Callable[..., list[Trace]]] = {
    Mesh: play_sharded,
    Resumed: play_resumed,
    Pipeline: play_pipeline,
    Context: play_context,
}


def job_on_ranks(spec: Spec, arm: Arm, device: str) -> Job:
    """The training of each rank."""
    return replace(job_of(spec, arm, device), tied=_filled_from(spec), layout=laid_out(spec))


def job_alone(spec: Spec, device: str) -> Job:
    """The same training in one process, of one data-parallel rank's piece of the rows."""
    if not copies_of(spec):
        spec = on_its_own(spec)
    return replace(job_of(spec, EAGER, device), tied=_filled_from(spec))


def _filled_from(spec: Spec) -> dict[str, str]:
    """Parameter -> the tensor that it is filled with, where that has another name: the stages of a
    pipeline all begin alike."""
    copies = copies_of(spec)
    if not copies:
        return ties(spec)
    every = parameter_shapes(spec)
    return {f"{copy}.{name}": name for copy in range(copies) for name in every}


def copies_of(spec: Spec) -> int:
    """How often its model stands in a row, as stages of a pipeline; 0: it stands alone."""
    return layout_of(spec).copies(spec.sharding)


def made(spec: Spec, recipe: Recipe, device: str) -> nn.Module:
    """The converted model: of a pipeline all stages in a row."""

    def build() -> nn.Module:
        return MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)

    copies = copies_of(spec)
    return recipe.convert(chained(build, copies) if copies else build(), spec)  # type: ignore[no-any-return]


def pieces_of(spec: Spec) -> tuple[Spec, ...]:
    """Specs of the linears that a rank may multiply: of its data-parallel rows uncut, and with K or
    N divided by the tensor-parallel ranks."""
    own, tensor = on_its_own(spec), max(spec.sharding.tensor, 1)
    cut = [msgspec.structs.replace(own, **{name: getattr(own, name) // tensor}) for name in "kn"]
    return own, *cut


def on_its_own(spec: Spec) -> Spec:
    """The Spec of one data-parallel rank's piece of the rows, in one process."""
    pieces = max(spec.sharding.data, 1)
    size = "batch" if spec.batch else "m"
    rows = getattr(spec, size) // pieces
    return msgspec.structs.replace(spec, sharding=ALONE, checkpoint="none", **{size: rows})


def piece_of(spec: Spec, tensors: Mapping[str, F32], piece: int) -> dict[str, F32]:
    """The tensors of that: all parameters, and its rows of inputs and output gradients."""
    pieces = max(spec.sharding.data, 1)

    def cut(name: str, x: F32) -> F32:
        rows = name_of(name).kind in ("input", "grad_output")
        return np.split(x, pieces)[piece] if rows else x

    return {name: cut(name, x) for name, x in tensors.items()}


def laid_out(spec: Spec) -> Mesh | Resumed | Pipeline | Context:
    """What each rank must know of the layout."""
    return _RECORDS[layout_of(spec).name](spec)


def _pipeline(spec: Spec) -> Pipeline:
    return Pipeline(copies_of(spec), spec.sharding.schedule, spec.steps, spec.microbatches)


def _context(spec: Spec) -> Context:
    own = spec.sharding
    return Context(own.ranks, own.rotates, spec.steps, spec.microbatches)


def _mesh(spec: Spec) -> Mesh | Resumed:
    sharding, model = spec.sharding, MODELS[spec.model]
    tied = {name.rpartition(".")[0] for name in ties(spec)}  # these stay in one unit
    each = model.regions or tuple(name for name in layer_names(spec) if name not in tied)
    mesh = Mesh(
        sharding.data,
        sharding.tensor,
        rows=(spec.batch or spec.m,) + ((spec.m,) if spec.batch else ()),
        widths={"input": 1 if model.takes_ids else spec.k, "grad_output": spec.width},
        cuts=_cuts(spec),
        styles=model.styles(spec),
        units=(*each, "") if sharding.units == "each" else ("",),
        narrow_styles=sharding.narrow_styles,
        sequence=sharding.sequence,
        local_output=sharding.local_output,
        reduces="float32" if sharding.reduces_fp32 else "",
        averages=sharding.averages,
        precomputes=sharding.gathers == "precomputed",
    )
    if not sharding.resumes:
        return mesh
    other = sharding.resumed
    cuts = _cuts(msgspec.structs.replace(spec, sharding=other))
    return Resumed(mesh, replace(mesh, data=other.data, tensor=other.tensor, cuts=cuts))


def _cuts(spec: Spec) -> dict[str, int]:
    """Along which dimension tensor parallelism cuts what a model is given; 0: it does not."""
    sharding, model = spec.sharding, MODELS[spec.model]
    styles, rows = (*model.styles(spec).values(),) or ("",), -2 if sharding.sequence else 0
    cuts = {
        # token ids are whole
        "input": 0 if model.takes_ids else -1 if styles[0] == "rowwise" else rows,
        "grad_output": -1 if styles[-1] == "colwise" else rows,
    }
    return cuts if sharding.tensor else dict.fromkeys(cuts, 0)


_RECORDS: dict[str, Callable[[Spec], Mesh | Resumed | Pipeline | Context]] = {
    "mesh": _mesh,
    "pipeline": _pipeline,
    "context": _context,
}
