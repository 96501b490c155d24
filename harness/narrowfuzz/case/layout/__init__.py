"""Layouts: how ranks share a training, or one process runs it. Each is a record in its own module.

=====================  =====================================  ======================================
module of the record   what it lays out                       player, in ``play/``
=====================  =====================================  ======================================
one.py                 one process, without ranks             converted.py
mesh.py                FSDP, DDP, tensor and expert           mesh.py; experts.py shares the experts
                       parallelism, and their combinations
pipeline.py            stages of a pipeline                   pipeline.py
context_parallel.py    rows of a sequence: context            context_parallel.py
                       parallelism
loss_parallel.py       classes of a loss                      loss_parallel.py
resumed.py             a mesh whose training is saved and     resumed.py
                       resumed in another mesh
=====================  =====================================  ======================================

``layout.py`` has the class of these records. A new layout needs a field of ``Sharding``, a module
here, a place in ``LAYOUTS`` before MESH (which takes every Sharding that no earlier layout takes),
and a player, ``play/<name>.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from narrowfuzz.case.events import Forward
from narrowfuzz.case.layout.context_parallel import CONTEXT
from narrowfuzz.case.layout.layout import Layout
from narrowfuzz.case.layout.loss_parallel import CLASSES
from narrowfuzz.case.layout.mesh import MESH
from narrowfuzz.case.layout.one import ONE
from narrowfuzz.case.layout.pipeline import PIPELINE
from narrowfuzz.case.layout.resumed import RESUMED
from narrowfuzz.case.spec import LOW_BIT, ModelName, Spec
from narrowfuzz.models.catalog import MODELS

__all__ = [
    "LAYOUTS",
    "MOST_RANKS",
    "Layout",
    "check_sharding",
    "fitting",
    "layout_of",
    "layouts",
]

#: The first whose ``matches(sharding)`` is true is the layout of a case.
LAYOUTS = (ONE, PIPELINE, CONTEXT, CLASSES, RESUMED, MESH)
#: Largest number of ranks of a case.
MOST_RANKS = 4


def layout_of(spec: Spec) -> Layout:
    """The layout of a Spec; ``ONE`` for one process."""
    return next(layout for layout in LAYOUTS if layout.matches(spec.sharding))


def fitting(spec: Spec) -> Spec:
    """The Spec with sizes that divide evenly over its ranks, and whatever else its layout needs."""
    return layout_of(spec).fit(spec)


def layouts(model: ModelName, shards: Collection[str]) -> tuple[Layout, ...]:
    """The layouts in which this model is drawn, given the ``shards`` that its recipe supports."""
    several = LAYOUTS[1:] if shards else ()
    return tuple(
        lay for lay in several if lay.requires_shard in (None, *shards) and lay.takes(model)
    )


def check_sharding(spec: Spec, shards: Collection[str]) -> None:
    """Raise ValueError naming the first part of a Spec's layout over ranks that is not supported.
    ``shards``: the ways in which its recipe can be laid out."""
    if spec.sharded:
        for why in _objections(spec, shards):
            raise ValueError(why)


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding, layout = spec.sharding, layout_of(spec)
    if not sharding.ranks:
        yield f"{sharding} has no ranks: give data, tensor, stages, context or classes"
    yield from layout.objections(spec, shards)
    if spec.compile != "none" and not layout.compiles:
        yield f"torch.compile is not supported with {sharding}: ranks of it are not compiled"
    if sharding.ranks > MOST_RANKS:
        yield f"{sharding.ranks} ranks: a case has at most {MOST_RANKS}"
    if MODELS[spec.model].random:
        yield f"{spec.model} draws other numbers on each rank"
    if spec.compile not in ("none", "aot_eager") or spec.dynamic:
        yield f"on ranks compile is 'none' or 'aot_eager' with static shapes, not {spec.compile!r}"
    if spec.optimizer in LOW_BIT and (spec.compile != "none" or not layout.follows_steps):
        yield (
            f"on ranks {spec.optimizer} trains models that FSDP or tensor parallelism lays out, "
            "without compile and without resumes"
        )
    if spec.lifecycle != "none" or spec.native or spec.autocast:
        yield "on ranks nothing is copied, autocast or run on other kernels"
    if spec.threads > 1:
        yield f"threads is 1 on ranks, not {spec.threads}: each rank has one"
    if spec.loss_scaling != "none" and not layout.scales:
        yield f"loss_scaling is 'none' with {sharding}: nothing tells its ranks of infinities"
    if spec.clipping not in ("none", *layout.clips):
        able = " or ".join(map(repr, ("none", *layout.clips)))
        yield f"clipping is {able} with {sharding}, not {spec.clipping!r}"
    if spec.events or any(isinstance(e, Forward) and e.mode != "train" for e in spec.training):
        yield "on ranks a model is trained by plain steps"
    if {spec.input_layout, spec.grad_layout, spec.weight_layout} != {"contiguous"}:
        yield "on ranks inputs, output gradients and parameters are contiguous"
    fit = fitting(spec)
    if fit != spec:
        if fit.sharding != sharding:
            yield f"{spec.model} is laid out with {fit.sharding}, not {sharding}"
        even = {name: getattr(fit, name) for name in ("batch", "m", "k", "n")}
        yield f"these sizes do not divide evenly over the ranks; {even} would"
