"""One call of a torch function and its backward, as scripts call it."""

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
    """The result, and the gradients of the ``wanted`` arguments; without a gradient of the result,
    only the result."""
    leaves = {name: arguments[name] for name in wanted if arguments[name] is not None}
    if grad_output is not None:
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    output = function(**{**arguments, **leaves})
    if grad_output is None:
        return (output,)
    output.backward(grad_output)
    return (output.detach(), *(leaves[n].grad if n in leaves else None for n in wanted))
