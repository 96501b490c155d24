"""What FSDP asks of a user's own model: which of its blocks can be units, and what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from narrowfuzz.play.own import floats_in, tensors_in


def units_of(model: nn.Module, blocks: Sequence[str], call: Callable[[], Any]) -> tuple[str, ...]:
    """Those of the blocks that FSDP can gather by themselves: no function uses their parameters
    while they are not running, when FSDP has freed them. None, if there are more than two gradients
    of a parameter outside of blocks to be added: their order, and so the sum, hangs on the units.
    ``call`` runs a forward."""
    inside = {name: model.get_submodule(name) for name in blocks}
    with _Readers(inside) as readers:
        call()
    if any(readers.uses[id(p)] > 2 for p in model.parameters() if id(p) not in readers.owners):
        return ()
    return tuple(name for name in blocks if name not in readers.read_from_outside)


def unshardable(model: nn.Module) -> str:
    """Why FSDP does not shard one of its parameters, as the end of a sentence; "" if it does. Some
    ``fully_shard`` refuses; and it makes new parameters, without the hooks of those before."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            return f"its parameter {name} is a scalar"
        if not parameter.is_contiguous():
            return f"its parameter {name} is not contiguous"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"it would drop the hook of the parameter {name}"
    return ""


def saves_as_named(model: nn.Module) -> bool:
    """True if its state_dict has the names of its parameters and buffers, as hooks may change them:
    torch.distributed.checkpoint looks for the parameter of each name."""
    named = (model.named_parameters, model.named_buffers)
    names = {name for those in named for name, _ in those(remove_duplicate=False)}
    return model.state_dict().keys() <= names


def gradients_by_input(
    model: nn.Module, call: Callable[[torch.Tensor], Any], example: torch.Tensor, ids: int
) -> list[dict[str, torch.Tensor | None]]:
    """The gradients of the trainable parameters, by name, with the example first and then with
    others of its shape; those at which ``call`` raises are left out, as the judge runs such, too.
    ``ids``: the size of the vocabulary, 0 if the example holds features."""
    same_rows = example.flatten()[: example.shape[-1]].expand_as(example)
    inputs = [example, example * 0, other_values(example, ids), same_rows]
    if not ids:
        noise = torch.randn(example.shape, generator=torch.Generator().manual_seed(0))
        inputs += [noise.to(example.dtype), example * 64, example * math.nan]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for x in inputs:
        try:
            gradients = gradients_of(call(x.clone()), [*trained.values()])
        except Exception:  # noqa: BLE001 - the judge runs such inputs, too, and says what they raise
            continue
        found.append(dict(zip(trained, gradients, strict=True)))
    return found


def reached_by_chance(found: Sequence[Mapping[str, torch.Tensor | None]]) -> tuple[str, ...]:
    """The parameters that get a gradient with some of the inputs only, as those of experts do."""
    names = found[0] if found else ()
    return tuple(name for name in names if len({one[name] is None for one in found}) > 1)


def sparse(found: Sequence[Mapping[str, torch.Tensor | None]]) -> str:
    """Which parameter gets a sparse gradient, as the end of a sentence; "" if none does."""
    for name, gradient in (pair for one in found for pair in one.items()):
        if gradient is not None and gradient.layout != torch.strided:
            return f"its parameter {name} gets sparse gradients, which FSDP does not reduce"
    return ""


def other_values(example: torch.Tensor, ids: int) -> torch.Tensor:
    """An input of the same shape, all of whose values are others if there are others."""
    return (example + 1) % ids if ids else example * -0.5 + 0.25


def gradients_of(results: Any, of: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the sum of all floats in a model's results."""
    ends = [t for t in floats_in(results) if t.requires_grad]
    if not ends:
        return (None,) * len(of)
    ones = [torch.ones_like(t) for t in ends]
    return torch.autograd.grad(ends, of, ones, allow_unused=True)


class _Readers(TorchFunctionMode):
    """Notes the blocks of which functions use a parameter while the block does not run."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.read_from_outside: set[str] = set()
        #: Parameter -> the number of functions that used it, and the blocks that it is in.
        self.uses: Counter[int] = Counter()
        self.owners: dict[int, set[str]] = {}
        self._running: Counter[str] = Counter()
        self._blocks, self._hooks = blocks, ExitStack()
        for name, block in blocks.items():
            for parameter in block.parameters():
                self.owners.setdefault(id(parameter), set()).add(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if tensors_in(made):  # else it asks for a shape or a dtype
            for t in tensors_in((args, kwargs)):
                self.uses[id(t)] += 1
                owners = self.owners.get(id(t), set())
                self.read_from_outside |= {name for name in owners if not self._running[name]}
        return made

    def _moves(self, name: str, by: int, *_: Any) -> None:
        self._running[name] += by

    def __enter__(self) -> Any:
        for name, block in self._blocks.items():
            begins = block.register_forward_pre_hook(partial(self._moves, name, 1))
            ends = block.register_forward_hook(partial(self._moves, name, -1), always_call=True)
            self._hooks.callback(begins.remove)
            self._hooks.callback(ends.remove)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hooks.close()
