"""One call of a function of torch and its backward: what a script calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def called(
    function: Callable[..., torch.Tensor],
    arguments: Mapping[str, Any],
    grad_output: torch.Tensor | None,
    *wanted: str,
) -> tuple[torch.Tensor | None, ...]:
    """The result, and the gradients of those arguments that are wanted; without a gradient of the
    result, the result alone."""
    leaves = {name: arguments[name] for name in wanted if arguments[name] is not None}
    if grad_output is not None:
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    output = function(**{**arguments, **leaves})
    if grad_output is None:
        return (output,)
    output.backward(grad_output)
    return (output.detach(), *(leaves[n].grad if n in leaves else None for n in wanted))
