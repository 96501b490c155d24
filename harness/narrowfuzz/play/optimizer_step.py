"""One step of an optimizer of torch on one parameter, from a given state: what a script calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def stepped(
    kind: str,
    options: Mapping[str, Any],
    steps: int,
    param: torch.Tensor,
    grad: torch.Tensor,
    **state: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The parameter and its state, in this order, after one step that follows so many others; it is
    the last of two that are alike."""
    both = [torch.nn.Parameter(param.clone()) for _ in range(2)]
    optimizer = getattr(torch.optim, kind)(both, **options)
    for parameter in both:
        parameter.grad = grad.clone()
        if steps:
            given = {name: t.clone() for name, t in state.items() if t is not None}
            optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **given}
    optimizer.step()
    after = optimizer.state[both[-1]]
    return (both[-1].detach(), *(after.get(name) for name in state))
