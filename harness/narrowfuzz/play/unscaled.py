"""A gradient as GradScaler unscales it, as scripts call it."""

from __future__ import annotations

import torch


def unscaled(
    grad: torch.Tensor, found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient, unscaled in place, and whether an element of it is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, inv_scale)
    return grad, found_inf
