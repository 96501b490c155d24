"""The bulk update of delayed scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .v2_codes import FLOAT_MAX, fp8
from .watch import Update, heard, tell


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Roll histories (length, n) and recompute scales (n,) in place, one table after another.

    Real contract (``kernel_bulk`` in ``common/recipe/delayed_scaling.cu``). Per column: the current
    amax is the reduction buffer's element, or the history's first row where that is 0. If it is 0
    too, nothing rolls. Else rows move up by one, the current amax goes last and row 0 becomes 0.
    "max" looks at the moved rows before row 0 is cleared and does not see NaN; "most_recent" takes
    the current amax. The scale becomes max * 2^-margin / amax if amax is finite and positive, stays
    otherwise, and is capped at the largest fp32.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise RuntimeError(
            f"amax_compute_algo {amax_compute_algo!r} is unknown; pass 'max' or 'most_recent'"
        )
    if heard():
        tell(Update(tuple(amax_histories), tuple(scales)))
    scaled_max = fp8(fp8_dtype).max * 2.0**-margin
    reduced = iter(amax_reduction_buffer.split([scale.numel() for scale in scales]))
    for history, scale in zip(amax_histories, scales, strict=True):
        current = next(reduced)
        current = torch.where(current != 0, current, history[0])
        amax = _roll(history, current)
        _rescale(scale, current if amax_compute_algo == "most_recent" else amax, scaled_max)


def _roll(history: Tensor, current: Tensor) -> Tensor:
    """Push ``current`` where it is not 0; returns the largest of the moved rows, 0 where idle."""
    moved = torch.cat((history[1:], current.unsqueeze(0)))
    active = current != 0
    amax = moved.nan_to_num(nan=0.0, posinf=torch.inf).clamp(min=0).amax(0)
    moved[0] = 0
    history.copy_(torch.where(active, moved, history))
    return torch.where(active, amax, torch.zeros_like(amax))


def _rescale(scale: Tensor, amax: Tensor, scaled_max: float) -> None:
    usable = amax.isfinite() & (amax > 0)
    fresh = torch.where(usable, torch.full_like(amax, scaled_max) / amax, scale)
    scale.copy_(torch.where(fresh.isinf(), torch.full_like(fresh, FLOAT_MAX), fresh))
