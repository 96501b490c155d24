"""Context parallelism: ranks share the rows of each sequence, and exchange its keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from narrowfuzz.case.layout.layout import SCHEDULES, Layout, up
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import ModelName, Spec
from narrowfuzz.models.catalog import MODELS


@dataclass(frozen=True)
class Context:
    """``ranks`` share the rows of each sequence and exchange keys and values by ``rotates``."""

    ranks: int
    rotates: str
    steps: int
    microbatches: int


def _takes(model: ModelName) -> bool:
    row = MODELS[model]
    whole = row.attends and row.kind != "operator"
    return whole and not (row.takes_ids or row.random or row.own or row.package)


def _fit(spec: Spec) -> Spec:
    """The Spec with sequences that divide into two pieces per rank, because each rank takes one of
    the beginning and one of the end. The width of a head is a multiple of 8, which every GPU kernel
    accepts; a single process would not need that."""
    ranks = spec.sharding.context
    return msgspec.structs.replace(
        spec,
        batch=max(spec.batch, 1),
        m=up(spec.m, 2 * ranks if ranks > 1 else 1),
        k=up(spec.k, 8 * spec.heads),
        n=max(spec.n, 1),
    )


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding = spec.sharding
    if sharding != Sharding(context=sharding.context, rotates=sharding.rotates):
        yield f"ranks that share sequences are laid out in no other way, got {sharding}"
    if CONTEXT.requires_shard not in shards:
        yield f"{spec.recipe} is not laid out by context: ranks would share what it scales by"
    if not _takes(spec.model) or spec.attention != "flash":
        able = ", ".join(filter(_takes, MODELS))
        yield f"ranks share no sequences of {spec.model}; they do of {able}, with flash attention"


def _simpler(sharding: Sharding) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if sharding.context > 2:
        yield "two ranks", {"context": 2}
    if sharding.rotates != "allgather":
        yield "allgather", {"rotates": "allgather"}


def _placement(spec: Spec, linears: Sequence[str]) -> Context:
    own = spec.sharding
    return Context(own.context, own.rotates, spec.steps, spec.microbatches)


CONTEXT = Layout(
    "context_parallel",
    lambda sharding: sharding.context > 0,
    _takes,
    _fit,
    _objections,
    _simpler,
    _placement,
    drawn=(
        (("context",), ((2,), (2,), (4,), (1,))),
        (("rotates",), (("allgather",), ("alltoall",))),
        (("steps", "microbatches"), SCHEDULES),
    ),
    requires_shard="context",
    single_group=True,
    threads=False,
    arm="sharded_context",
    title="eager, on ranks that are processes and share the rows of each sequence",
    compiles=False,
    cuts_sums=lambda sharding: sharding.context > 1,
    approximate=True,
)
