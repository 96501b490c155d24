"""What FSDP asks of a user's own model: which of its blocks can be units, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from narrowfuzz.play.own import tensors_in


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


def scalars_of(model: nn.Module) -> tuple[str, ...]:
    """Its parameters without dimensions, which ``fully_shard`` refuses."""
    return tuple(name for name, p in model.named_parameters() if not p.dim())


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
