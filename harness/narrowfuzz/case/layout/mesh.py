"""Ranks that share the rows by FSDP, each linear by tensor parallelism, or both."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from narrowfuzz.case.layout.layout import Layout, up
from narrowfuzz.case.spec import ALONE, ModelName, Sharding, Spec
from narrowfuzz.models.catalog import MODELS

#: Fewer ranks, data- and tensor-parallel.
_RANKS = ((1, 0), (0, 1), (2, 0), (0, 2), (2, 2))


def _takes(model: ModelName) -> bool:
    row = MODELS[model]
    return not (row.random or row.own or row.kind == "operator")


def _fit(spec: Spec) -> Spec:
    """As many rows as its ranks share evenly, at least one feature each, and laid out as its model
    is."""
    sharding = spec.sharding
    for by, given in MODELS[spec.model].laid.items():
        if getattr(sharding, by):
            sharding = msgspec.structs.replace(sharding, **given)
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
        # a local tensor of a feature dimension is taken for an even piece of it
        for name in ("k", "n"):
            sizes[name] = up(getattr(spec, name), tensor)
    return msgspec.structs.replace(spec, sharding=sharding, **sizes)


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding, model = spec.sharding, MODELS[spec.model]
    for by, asked in (("fsdp", sharding.data), ("tensor", sharding.tensor)):
        if asked and by not in shards:
            yield f"{spec.recipe} is not laid out by {by}"
    narrow = sharding.gathers != "values" or sharding.narrow_styles
    if narrow and "codes" not in shards:
        yield f"{spec.recipe} communicates no codes: leave gathers and narrow_styles"
    if sharding.tensor and not model.shared:
        able = ", ".join(name for name, other in MODELS.items() if other.shared)
        yield f"tensor parallelism shares no linears of {spec.model}; it does of {able}"
    if sharding.resumes:
        yield from _never_resumes(spec, shards)


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


def _simpler(sharding: Sharding) -> Iterator[tuple[str, Mapping[str, Any]]]:
    own = sharding
    for data, tensor in _RANKS:
        smaller = max(data, 1) * max(tensor, 1) <= own.ranks and (data <= own.data or not data)
        if smaller and (data, tensor) != (own.data, own.tensor) and (tensor <= own.tensor):
            yield f"{data}x{tensor} ranks", {"data": data, "tensor": tensor}
    for name in Sharding.__struct_fields__:
        value = getattr(ALONE, name)
        if name not in ("data", "tensor") and getattr(own, name) != value:
            yield f"sharding {name}", {name: value}


MESH = Layout(
    "mesh",
    lambda sharding: True,
    _takes,
    _fit,
    _objections,
    _simpler,
    cuts_sums=lambda sharding: sharding.tensor > 1,
)
