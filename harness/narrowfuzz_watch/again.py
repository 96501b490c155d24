"""An operator's operands and results, and what it returns if run again on the same operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from narrowfuzz_watch import screen
from narrowfuzz_watch.operators import Operator, tensors

#: ``Operator.writes`` of an in-place operator that writes only its first argument.
_SELF = ((0, "self"),)


@dataclass(frozen=True)
class Again:
    """The outcome of running an operator again.

    same: the same bits. clean: less bad than the first time. other: as bad or worse, but with other
    bits. "": it could not be run again; ``why`` is the reason.
    """

    how: Literal["same", "clean", "other", ""]
    why: str = ""


def readable(
    what: Operator, given: tuple[tuple[Any, ...], dict[str, Any]]
) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the operands that an operator reads."""
    args, kwargs = given
    skipped = {name for _, name in what.writes} if what.overwrites else set()
    named = [*zip(what.names, args, strict=False), *kwargs.items()]
    found = []
    for name, value in named:
        if name not in skipped:
            parts = tensors(value)
            plain = isinstance(value, torch.Tensor)
            found += [(name if plain else f"{name}[{i}]", part) for i, part in enumerate(parts)]
    return found


def results(
    what: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> list[torch.Tensor]:
    """The tensors that an operator has returned or written, each once."""
    if isinstance(out, torch.Tensor) and (
        not what.writes or (what.writes == _SELF and args and out is args[0])
    ):
        return [out]
    written = [
        tensor
        for position, name in what.writes
        for tensor in tensors(args[position] if position < len(args) else kwargs.get(name))
    ]
    return list({id(tensor): tensor for tensor in (*written, *tensors(out))}.values())


def again(
    what: Operator,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: dict[int, torch.Tensor],
    first: list[torch.Tensor],
) -> Again:
    """Run the operator once more, on copies of the tensors that it writes.

    ``before`` has their contents from before its first run, by the tensor's id; ``first`` are its
    first results, with the worst state ``bad``.
    """
    if what.random:
        return Again("", "it draws random numbers")
    if what.kind != "plain":
        return Again("", "other ranks take part in it")
    copies = {key: value.clone() for key, value in before.items()}
    if what.writes and not what.overwrites and not copies:
        return Again("", "it has written over its operands")
    if what.overwrites:
        written = [
            tensor
            for position, name in what.writes
            for tensor in tensors(args[position] if position < len(args) else kwargs.get(name))
        ]
        copies = {id(tensor): torch.empty_like(tensor) for tensor in written}
    new_args, new_kwargs = _replaced(args, copies), _replaced(kwargs, copies)
    devices = [torch.cuda.current_device()] if first[0].is_cuda else []
    with torch.random.fork_rng(devices):
        try:
            out = func(*new_args, **new_kwargs)
        except RuntimeError as error:
            return Again("", f"it raised {error}")
    second = results(what, new_args, new_kwargs, out)
    if screen.same_bits(first, second):
        return Again("same")
    now = screen.worst([screen.state(tensor) for tensor in second])
    return Again("clean" if now == "ok" else "other")


def _replaced(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replaced(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, copies) for item in value)
    return value
