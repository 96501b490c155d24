"""The layout in which ranks share the classes of a loss: each has some columns of the logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from narrowfuzz.case.layout.layout import SCHEDULES, Layout
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import ModelName, Spec
from narrowfuzz.models.catalog import MODELS


@dataclass(frozen=True)
class Classes:
    """Each of the ``ranks`` has some columns of every row of logits."""

    ranks: int
    steps: int
    microbatches: int


def _takes(model: ModelName) -> bool:
    return MODELS[model].classes


def _fit(spec: Spec) -> Spec:
    """The Spec with at least one row and one class: torch divides any number of classes."""
    return msgspec.structs.replace(spec, m=max(spec.m, 1), k=max(spec.k, 1), n=max(spec.n, 1))


def _objections(spec: Spec, shards: Collection[str]) -> Iterator[str]:
    sharding = spec.sharding
    if sharding != Sharding(classes=sharding.classes, processes=sharding.processes):
        yield f"ranks that share classes are laid out in no other way, got {sharding}"
    if sharding.classes == 1:
        yield "one rank has all classes: give 2 or more"
    if CLASSES.requires_shard not in shards:
        yield f"{spec.recipe} is not laid out by classes: it converts what makes the logits"
    if not _takes(spec.model):
        able = ", ".join(filter(_takes, MODELS))
        yield f"ranks share no classes of {spec.model}; they do of {able}"


def _simpler(sharding: Sharding) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if sharding.classes > 2:
        yield "two ranks", {"classes": 2}
    if sharding.processes:
        yield "threads as ranks", {"processes": False}


def _placement(spec: Spec, linears: Sequence[str]) -> Classes:
    return Classes(spec.sharding.classes, spec.steps, spec.microbatches)


CLASSES = Layout(
    "loss_parallel",
    lambda sharding: sharding.classes > 0,
    _takes,
    _fit,
    _objections,
    _simpler,
    _placement,
    drawn=(
        (("classes",), ((2,), (2,), (3,), (4,))),
        (("processes",), (*[(False,)] * 9, (True,))),
        (("steps", "microbatches"), SCHEDULES),
    ),
    requires_shard="classes",
    single_group=True,
    processes=True,
    compiles=False,
    cuts_sums=lambda sharding: True,
    approximate=True,
)
