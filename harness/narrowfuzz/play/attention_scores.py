"""What an attention kernel sums, of numpy's arrays as of torch's tensors: it imports neither, so
that rule and script ask the same."""

from __future__ import annotations

from typing import Any


def scores(q: Any, k: Any, scale: float, added: Any) -> Any:
    """What the exponential is taken of, [batch, heads, rows, columns]: heads of queries may share
    one of keys, and a mask is ``added`` (None: there is none)."""
    share = q.shape[1] // k.shape[1]
    k = k[:, [head // share for head in range(q.shape[1])]]
    return with_mask(q @ k.swapaxes(-1, -2) * scale, added)


def with_mask(found: Any, added: Any) -> Any:
    """The scores with what is added to them. Beside a large mask fp32 keeps nothing of a score that
    is below a quarter of its last place."""
    if added is None:
        return found
    return found * ((abs(added) < 2.0**20) | (abs(found) > 2.0**-26 * abs(added))) + added


def sums_to_one(scores: Any, lse: Any, added: Any) -> Any:
    """Of which rows exp(scores - lse) has the sum 1: not of those whose keys are all masked, or
    have scores that fp32 may not hold, and whose log-sum-exp kernels give as they like. Of 2^20 one
    rounding of fp32 is 1/16: beyond it only those rows are known whose scores are the mask's."""
    known = abs(lse) < 2.0**20
    if added is not None:
        known = known | (scores == added).all(-1)
    return (scores > -(2.0**100)).any(-1) & known
