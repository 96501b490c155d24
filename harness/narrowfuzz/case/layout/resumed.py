"""A mesh of ranks whose training is saved and resumed in another mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import msgspec

from narrowfuzz.case.layout.mesh import MESH
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play.job import Resumed


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    yield from MESH.objections(spec, shards)
    sharding, model = spec.sharding, MODELS[spec.model]
    if spec.steps < 2:
        yield "what resumes has done a step: steps is 2 or more"
    if sharding.resumes == "fewer" and sharding.data < 2:
        yield "fewer data-parallel ranks than 2 are none: resumes is 'same', 'alone' or 'swapped'"
    if sharding.resumes == "regrouped" and not sharding.experts:
        yield "no ranks share experts, so resumes is 'same', 'fewer' or 'alone'"
    able = model.shared and not model.prescribed_sharding and {"fsdp", "tensor"} <= set(shards)
    if sharding.resumes == "swapped" and (not able or sharding.gathers != "values"):
        yield (
            f"{spec.recipe} and {spec.model} are not laid out by data- and by tensor-parallel "
            "ranks alike, gathering values: resumes is 'same', 'fewer' or 'alone'"
        )


def _placement(spec: Spec, linears: Sequence[str]) -> Resumed:
    after = msgspec.structs.replace(spec, sharding=spec.sharding.resumed)
    return Resumed(MESH.placement(spec, linears), MESH.placement(after, linears))


RESUMED = replace(
    MESH,
    name="resumed",
    matches=lambda sharding: bool(sharding.resumes),
    objections=_objections,
    placement=_placement,
    follows_steps=False,
)
