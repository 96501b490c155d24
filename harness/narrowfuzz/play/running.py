"""Which module of a model runs."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn


class Running:
    """When called, returns the name of the innermost module of the followed model that is in its
    forward, "" if none is."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._hooks = ExitStack()

    def __call__(self) -> str:
        return self._names[-1] if self._names else ""

    def follow(self, model: nn.Module) -> None:
        """Follow this model's modules from now on, and no others."""
        self.leave()
        for name, module in model.named_modules():
            pre = module.register_forward_pre_hook(partial(self._begins, name))
            self._hooks.callback(pre.remove)
            # a recompute may stop in the middle
            post = module.register_forward_hook(self._ends, always_call=True)
            self._hooks.callback(post.remove)

    def leave(self) -> None:
        """Follow no model any more."""
        self._hooks.close()
        self._names.clear()

    def _begins(self, name: str, *_: Any) -> None:
        self._names.append(name)

    def _ends(self, *_: Any) -> None:
        if self._names:
            self._names.pop()
