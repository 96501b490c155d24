"""What the first forward of a user's model does that later ones do not: it fills buffers, or
initialises parameters, by a flag."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowfuzz.own_models.calls import Answer, digest, first_differing_module, observe_call
from narrowfuzz.own_models.ids import other_ids
from narrowfuzz.own_models.source import Source
from narrowfuzz.play.own import OwnModel


def buffers_of(module: nn.Module) -> dict[str, bytes]:
    """Name -> hash of the bytes of every buffer."""
    return {name: digest([buffer]) for name, buffer in module.named_buffers()}


@dataclass(frozen=True)
class Fresh:
    """How new instances of a model are made, as players make them, and how each is called; a call
    adds the buffers that not only a first forward changes to ``changing``."""

    make: Callable[[], OwnModel]
    calling: Callable[[OwnModel], Callable[[torch.Tensor], Any]]
    changing: set[str]


def another_input(example: torch.Tensor) -> torch.Tensor:
    """An input that differs from the example: other token ids, or other features."""
    if not example.is_floating_point():
        return other_ids(example)
    half = example * 0.5
    ramp = torch.linspace(0.25, 0.75, example.numel()).reshape(example.shape)
    return example + ramp.to(example.dtype) if torch.equal(half, example) else half


def check_filled(source: Source, fresh: Fresh, example: torch.Tensor) -> None:
    """Refuse a model whose first forward fills a buffer with values that depend on its input, or
    that differ each time, and that later forwards leave."""

    def filled(first: torch.Tensor) -> Mapping[str, bytes]:
        """The buffers after a forward of this input and one of the example, which may overwrite
        them."""
        own = fresh.make()
        call = fresh.calling(own)
        call(first)
        call(example)
        return buffers_of(own.model)

    if not (as_given := filled(example)):
        return

    def differing(other: Mapping[str, bytes]) -> list[str]:
        every = (name for name, held in as_given.items() if other.get(name) != held)
        return [name for name in every if name not in fresh.changing]

    if changed := differing(filled(another_input(example))):
        name, how = changed[0], "depending on its input"
        if random := differing(filled(example)):
            name, how = random[0], "with other values for the same input"
        raise source.refused(
            f"the first forward fills its buffer {name} {how}, so no two runs are the same: fill "
            "it where the model is built"
        )


def check_first(
    source: Source, own: OwnModel, example: torch.Tensor, changing: Collection[str]
) -> None:
    """Refuse a model whose first forward differs from the next one of the same input that begins
    with the same parameters and ``changing`` buffers. ``own`` has not been called yet."""
    began = {name: t.detach().clone() for name, t in _state(own.model, changing).items()}
    first, wrote = _run(own, example, changing)
    if made := [name for name in wrote if name not in began]:
        raise source.refused(
            f"the first forward makes its parameter {made[0]}, so no two runs are the same: create "
            "it where the model is built"
        )
    for name, t in _state(own.model, changing).items():
        t.data.copy_(began[name])
    later, writes = _run(own, example, changing)
    if written := [name for name, then in wrote.items() if writes[name] != then]:
        raise source.refused(
            f"the first forward writes other values into {written[0]} than a later one of the same "
            "input, as an initialisation by a flag does, so no two runs are the same: initialise "
            "it where the model is built"
        )
    if not first.same(later):
        raise source.refused(
            "the first forward gives another output than a later one of the same input: the first "
            f"module that does is {first_differing_module(first, later)}, and no two runs are the "
            "same. Keep nothing between calls"
        )


def _state(model: nn.Module, changing: Collection[str]) -> dict[str, torch.Tensor]:
    buffers = {name: model.get_buffer(name) for name in changing}
    return {**dict(model.named_parameters()), **buffers}


def _run(
    own: OwnModel, example: torch.Tensor, changing: Collection[str]
) -> tuple[Answer, dict[str, bytes]]:
    """The results of a forward, and hashes of what it leaves."""
    answer = observe_call(own.model, lambda: own.called(example.clone()))
    return answer, {name: digest([t]) for name, t in _state(own.model, changing).items()}
