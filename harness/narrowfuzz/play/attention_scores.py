"""Attention scores, and the rows whose probabilities must sum to 1, for numpy arrays as well as
torch tensors: it imports neither, so that rules and scripts share it."""

from __future__ import annotations

from typing import Any


def scores(q: Any, k: Any, scale: float, added: Any) -> Any:
    """The scores that softmax exponentiates, [batch, heads, rows, columns]. Several query heads may
    share one key head; ``added`` is an additive mask (None: no mask)."""
    share = q.shape[1] // k.shape[1]
    k = k[:, [head // share for head in range(q.shape[1])]]
    return with_mask(q @ k.swapaxes(-1, -2) * scale, added)


def with_mask(found: Any, added: Any) -> Any:
    """The scores plus the additive mask. Next to a large mask value, fp32 loses every score below a
    quarter of that value's last place: such a score counts as 0."""
    if added is None:
        return found
    return found * ((abs(added) < 2.0**20) | (abs(found) > 2.0**-26 * abs(added))) + added


def sums_to_one(scores: Any, lse: Any, added: Any) -> Any:
    """True for rows where exp(scores - lse) must sum to 1: not for rows whose keys are all masked
    or whose scores may overflow fp32, for which kernels return any log-sum-exp. One fp32 rounding
    of 2^20 is 1/16: beyond it only rows are certain whose scores all equal the mask."""
    known = abs(lse) < 2.0**20
    if added is not None:
        known = known | (scores == added).all(-1)
    return (scores > -(2.0**100)).any(-1) & known
