"""Pipeline parallelism: copies of the model in a row are the stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from narrowfuzz.case.layout.layout import Layout
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import ModelName, Spec
from narrowfuzz.models.catalog import MODELS

#: (stages, schedule, microbatches), one of which is drawn.
_DRAWN = (
    (2, "1f1b", 2),
    (3, "1f1b", 3),
    (2, "gpipe", 3),
    (3, "gpipe", 2),
    (4, "interleaved", 2),
)


@dataclass(frozen=True)
class Pipeline:
    """``stages`` models in a row, one or two per rank, run by one of torch's schedules."""

    stages: int
    schedule: str
    steps: int
    microbatches: int


def _takes(model: ModelName) -> bool:
    row = MODELS[model]
    several = row.kind not in ("norm", "operator")
    return several and not (row.takes_ids or row.random or row.own or row.package)


def _fit(spec: Spec) -> Spec:
    """The Spec with an output as wide as the input, because each stage feeds the next, with at
    least one row to send, and without the reentrant checkpoint, which stages do not support."""
    m, k, n = (max(size, 1) for size in (spec.m, spec.k, spec.n))
    again = "full" if spec.checkpoint == "reentrant" else spec.checkpoint
    n = k if MODELS[spec.model].wide else n
    return msgspec.structs.replace(spec, m=m, k=k, n=n, checkpoint=again)


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
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
    if not _takes(spec.model):
        yield f"{spec.model} cannot follow on itself in a pipeline"


def _simpler(sharding: Sharding) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if sharding.stages > 2:
        yield "two stages", {"stages": 2, "schedule": "gpipe"}


def _placement(spec: Spec, linears: Sequence[str]) -> Pipeline:
    own = spec.sharding
    return Pipeline(own.stages, own.schedule, spec.steps, spec.microbatches)


PIPELINE = Layout(
    "pipeline",
    lambda sharding: sharding.stages > 0,
    _takes,
    _fit,
    _objections,
    _simpler,
    _placement,
    drawn=(
        (("stages", "schedule", "microbatches"), _DRAWN),
        (("steps",), ((1,), (2,))),
    ),
    single_group=True,
    scales="sharded",
    clips=("value",),
    threads=False,  # threads have no send and receive, which stages communicate by
    copies=lambda sharding: sharding.stages,
)
