"""The blocks of a user's model that training code recomputes one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from narrowfuzz.play.own import OwnModel, tensors_in


def blocks_of(own: OwnModel, module: Any, call: Callable[[], Any]) -> tuple[tuple[str, ...], bool]:
    """Names of the blocks of each ModuleList that contains linears, which training code recomputes
    one by one, and whether each call of one gets a tensor that needs a gradient. Blocks inside of
    other blocks do not count, nor do those that are never called themselves, but part by part."""
    lists = list(_lists(module))

    def parts(blocks: tuple[str, ...]) -> set[nn.Module]:
        return {part for name in blocks for part in own.get_submodule(name).modules()}

    found: list[tuple[str, ...]] = []
    given: list[bool] = []
    inside: set[nn.Module] = set()
    for blocks in sorted(lists, key=lambda blocks: -len(parts(blocks))):  # outer ones first
        outer = tuple(itertools.chain(*found))
        apart = inside.isdisjoint(map(own.get_submodule, blocks))
        if apart and (calls := _called(own, blocks, outer, call)):
            found, given, inside = [*found, blocks], given + calls, inside | parts(blocks)
    in_order = sorted(found, key=lists.index)
    return tuple(itertools.chain(*in_order)), bool(found) and all(given)


def _lists(module: Any) -> Iterator[tuple[str, ...]]:
    """Names of the blocks of each ModuleList that contains linears, but not of one of bare linears:
    what a checkpoint repeats is a module's ``forward``, and what a linear is given there is seen by
    hooks around it, which are not called again."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and _holds_linears(part):
            blocks = dict(_members(name, part))
            if not any(isinstance(block, nn.Linear) for block in blocks.values()):
                yield tuple(f"model.{block}" for block in blocks)


def _called(
    own: OwnModel, blocks: tuple[str, ...], outer: tuple[str, ...], call: Callable[[], Any]
) -> list[bool]:
    """For each call of a block in this call of the model: is it given a tensor that needs a
    gradient, as the reentrant checkpoint requires? Behind a frozen embedding the first one is not.
    Nothing if one is called inside of an ``outer`` block, or without a graph, as the blocks of a
    reversible model are: then nobody recomputes it by a checkpoint of its own."""
    given: list[bool] = []
    apart, depth = True, 0

    def note(module: Any, args: Any) -> None:
        nonlocal apart
        apart = apart and not depth and torch.is_grad_enabled()
        given.append(any(t.requires_grad for t in tensors_in([args])))

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as hooks, torch.enable_grad():
        for name in outer:
            module = own.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        for name in blocks:
            hooks.callback(own.get_submodule(name).register_forward_pre_hook(note).remove)
        call()
    return given if apart else []


def _holds_linears(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Linear) for m in module.modules())


def _members(name: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of what such a list holds, and of what lists in it hold: nobody calls a list
    itself."""
    for key, member in part.named_children():
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            yield from _members(f"{name}.{key}", member)
        else:
            yield f"{name}.{key}", member
