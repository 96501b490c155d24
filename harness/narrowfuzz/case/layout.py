"""Which layouts over ranks a Spec may have."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from narrowfuzz.case.events import Forward
from narrowfuzz.case.spec import LARGEST, Sharding, Spec
from narrowfuzz.models.catalog import MODELS

#: Ranks of a case.
MOST_RANKS = 4


def fitting(spec: Spec) -> Spec:
    """The same Spec with as many rows as its ranks share evenly, at least one feature each, and
    laid out as its model is."""
    sharding = spec.sharding
    for by, given in MODELS[spec.model].laid.items():
        if getattr(sharding, by):
            sharding = msgspec.structs.replace(sharding, **given)
    if sharding.context:  # each rank takes a piece of the beginning and one of the end
        pieces = 2 * sharding.context if sharding.context > 1 else 1
        # heads as wide as every kernel of a GPU takes, which one process may do without
        return msgspec.structs.replace(
            spec,
            sharding=sharding,
            batch=max(spec.batch, 1),
            m=_up(spec.m, pieces),
            k=_up(spec.k, 8 * spec.heads),
            n=max(spec.n, 1),
        )
    if sharding.stages:  # each takes what the one before leaves, and there are rows to send
        m, k, n = (max(size, 1) for size in (spec.m, spec.k, spec.n))
        return msgspec.structs.replace(spec, m=m, k=k, n=k if MODELS[spec.model].wide else n)
    layouts = sharding, sharding.resumed
    data = math.lcm(*(max(layout.data, 1) for layout in layouts))
    tensor = math.lcm(*(max(layout.tensor, 1) for layout in layouts))
    inside = tensor if sharding.sequence else 1
    sizes: dict[str, Any] = {}
    if spec.batch:
        sizes = {"batch": _up(spec.batch, data), "m": _up(spec.m, inside)}
    else:
        sizes = {"m": _up(spec.m, data * inside)}
    if tensor > 1:
        # a local tensor of a feature dimension is taken for an even piece of it
        for name in ("k", "n"):
            sizes[name] = _up(getattr(spec, name), tensor)
    return msgspec.structs.replace(spec, sharding=sharding, **sizes)


def _up(size: int, multiple: int) -> int:
    return min(-(-max(size, 1) // multiple), LARGEST // multiple) * multiple


def shardable(model: str, shards: Collection[str]) -> bool:
    """Is this model drawn on ranks, under a recipe that is laid out so?"""
    row = MODELS[model]
    return bool(shards) and not (row.random or row.own)


def check_sharding(spec: Spec, shards: Collection[str]) -> None:
    """Raise ValueError naming what of a Spec's layout over ranks cannot be; ``shards`` is what its
    recipe is laid out by."""
    if spec.sharded:
        for why in _objections(spec, shards):
            raise ValueError(why)


def pipelined(model: str) -> bool:
    """May this model follow on itself, as stages of a pipeline?"""
    row = MODELS[model]
    return row.kind != "norm" and not (row.takes_ids or row.random or row.own or row.package)


def contextual(model: str) -> bool:
    """May ranks share the rows of this model's sequences?"""
    row = MODELS[model]
    return row.attends and not (row.takes_ids or row.random or row.own or row.package)


def _of_contexts(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding = spec.sharding
    if sharding != Sharding(context=sharding.context, rotates=sharding.rotates):
        yield f"ranks that share sequences are laid out in no other way, got {sharding}"
    if "context" not in shards:
        yield f"{spec.recipe} is not laid out by context: ranks would share what it scales by"
    if not contextual(spec.model) or spec.attention != "flash":
        able = ", ".join(filter(contextual, MODELS))
        yield f"ranks share no sequences of {spec.model}; they do of {able}, with flash attention"
    if spec.compile != "none":
        yield "ranks that share sequences are not compiled"


def _of_pipelines(spec: Spec) -> Iterator[str]:
    sharding, ranks = spec.sharding, spec.sharding.ranks
    if sharding != Sharding(stages=sharding.stages, schedule=sharding.schedule):
        yield f"a pipeline of stages is laid out in no other way, got {sharding}"
    if ranks < 2 or (sharding.schedule == "interleaved" and sharding.stages % 2):
        yield f"{sharding.schedule!r} puts {sharding.stages} stages on no two ranks or more"
    if sharding.schedule == "1f1b" and spec.microbatches < sharding.stages:
        yield f"1f1b needs a microbatch for each of {sharding.stages} stages: give microbatches"
    if sharding.schedule == "interleaved" and spec.microbatches % ranks:
        yield f"interleaved needs microbatches in multiples of {ranks}, got {spec.microbatches}"
    if spec.checkpoint == "reentrant":
        yield "a stage hands inputs to its backward, which torch's reentrant checkpoint refuses"
    if not pipelined(spec.model):
        yield f"{spec.model} cannot follow on itself in a pipeline"


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding, model = spec.sharding, MODELS[spec.model]
    if not sharding.ranks:
        yield f"{sharding} has no ranks: give data, tensor, stages or context"
    if sharding.stages:
        yield from _of_pipelines(spec)
    if sharding.context:
        yield from _of_contexts(spec, shards)
    if sharding.ranks > MOST_RANKS:
        yield f"{sharding.ranks} ranks: a case has at most {MOST_RANKS}"
    for by, asked in (("fsdp", sharding.data), ("tensor", sharding.tensor)):
        if asked and by not in shards:
            yield f"{spec.recipe} is not laid out by {by}"
    narrow = sharding.gathers != "values" or sharding.narrow_styles
    if narrow and "codes" not in shards:
        yield f"{spec.recipe} communicates no codes: leave gathers and narrow_styles"
    if sharding.tensor and not model.shared:
        able = ", ".join(name for name, other in MODELS.items() if other.shared)
        yield f"tensor parallelism shares no linears of {spec.model}; it does of {able}"
    if model.random:
        yield f"{spec.model} draws other numbers on each rank"
    if spec.compile not in ("none", "aot_eager") or spec.dynamic:
        yield f"on ranks compile is 'none' or 'aot_eager' with static shapes, not {spec.compile!r}"
    if spec.lifecycle != "none" or spec.native or spec.autocast:
        yield "on ranks nothing is copied, autocast or run on other kernels"
    if sharding.resumes:
        yield from _never_resumes(spec, shards)
    if spec.events or any(isinstance(e, Forward) and e.mode != "train" for e in spec.training):
        yield "on ranks a model is trained by plain steps"
    layouts = spec.input_layout, spec.grad_layout
    if layouts != ("contiguous", "contiguous"):
        yield "on ranks inputs and output gradients are contiguous"
    if fitting(spec) != spec:
        fit = fitting(spec)
        if fit.sharding != sharding:
            yield f"{spec.model} is laid out with {fit.sharding}, not {sharding}"
        even = {name: getattr(fit, name) for name in ("batch", "m", "k", "n")}
        yield f"these ranks share no such sizes evenly; they do {even}"


def _never_resumes(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding, model = spec.sharding, MODELS[spec.model]
    if spec.steps < 2:
        yield "what resumes has done a step: steps is 2 or more"
    if sharding.resumes == "fewer" and sharding.data < 2:
        yield "fewer data-parallel ranks than 2 are none: resumes is 'same', 'alone' or 'swapped'"
    able = model.shared and not model.laid and {"fsdp", "tensor"} <= set(shards)
    if sharding.resumes == "swapped" and (not able or sharding.gathers != "values"):
        yield (
            f"{spec.recipe} and {spec.model} are not laid out by data- and by tensor-parallel "
            "ranks alike, gathering values: resumes is 'same', 'fewer' or 'alone'"
        )
