"""Records what every module of a model is given and returns, linears or not."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from narrowfuzz.play.layers import Call, LayerWatch


class ModuleWatch(LayerWatch):
    """Records the calls of modules of any kind: every tensor that one is given and returns, and
    whether a gradient comes back to it. Nothing stands in between."""

    def __init__(self, place: Any) -> None:
        super().__init__(place)
        self._ended = 0

    def _attach(self, name: str, module: nn.Module, stack: ExitStack) -> None:
        running: list[Call] = []

        def before(module: Any, args: Any, named: Any) -> None:
            running.append(self._begun(name))
            running[-1].tensors |= self._every("input", (args, named))

        def after(module: Any, args: Any, named: Any, output: Any) -> None:
            call = running.pop()
            call.outputs |= self._every("output", output)
            call.ended, self._ended = self._ended, self._ended + 1

            def note(grad: torch.Tensor) -> None:
                call.tensors["grad_output"] = self.now(grad)

            for t in tensors_of(output):
                if t.requires_grad:
                    t.register_hook(note)

        pre = module.register_forward_pre_hook(before, with_kwargs=True)
        stack.callback(pre.remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def _every(self, name: str, held: Any) -> dict[str, torch.Tensor]:
        """The tensors in there, by this name and their numbers."""
        return {f"{name}{i or ''}": self.now(t) for i, t in enumerate(tensors_of(held))}


def tensors_of(held: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, as deep as they lie."""
    return [t for t in tree_leaves(held) if isinstance(t, torch.Tensor)]
