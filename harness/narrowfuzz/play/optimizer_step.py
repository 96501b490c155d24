"""Steps of an optimizer on one parameter, as scripts call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowfuzz.play.literal import laid


def stepped(
    kind: str,
    options: Mapping[str, Any],
    steps: int,
    param: torch.Tensor,
    grad: torch.Tensor,
    **state: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The parameter and its state, in this order, after one step that follows ``steps`` others; the
    optimizer has two equal parameters, of which the last is returned."""
    both = [torch.nn.Parameter(laid(param, param.stride())) for _ in range(2)]
    optimizer = getattr(torch.optim, kind)(both, **options)
    for parameter in both:
        parameter.grad = laid(grad, grad.stride())
        given = {name: laid(t, t.stride()) for name, t in state.items() if t is not None}
        if given:  # some keep a state before their first step
            optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **given}
    optimizer.step()
    after = optimizer.state[both[-1]]
    return (both[-1].detach(), *(after.get(name) for name in state))


def trained(
    kind: str, options: Mapping[str, Any], start: torch.Tensor, grads: torch.Tensor
) -> tuple[torch.Tensor]:
    """The parameter after one step per gradient of a torchao optimizer, which would compile its
    steps if not run eagerly."""
    import torchao.optim

    parameter = torch.nn.Parameter(start.clone())
    optimizer = getattr(torchao.optim, kind)([parameter], **options)
    with torch.compiler.set_stance("force_eager"):
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
    return (parameter.detach(),)
