"""Products of queries and keys in float64, cached for everything that judges attention on the same
operands: a forward, its backward, and the statistics that the forward saves for the backward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from narrowfuzz.numerics.formats import F32, F64

#: Number of cached results: enough for the layers of a small model, whose backwards run after all
#: its forwards.
_KEPT = 2


@dataclass(frozen=True)
class Products:
    """The parts of attention scores in float64, [batch, heads, rows, columns] except for q and k.
    The arrays are shared: none may be written to."""

    #: [batch, heads, rows, width] and [batch, heads, columns, width].
    q: F64
    k: F64
    #: q k^T, and |q| |k|^T.
    raw: F64
    size: F64
    #: The sum of |q| of the query plus the sum of |k| of the key: times the magnitude below which
    #: factors are flushed to zero, it bounds what that loses.
    sums: F64


#: The last results, with the shapes and bytes of their operands.
_last: deque[tuple[tuple[object, ...], Products]] = deque(maxlen=_KEPT)


def products(q: F32, k: F32) -> Products:
    """The products of queries [batch, heads, rows, width] with keys that have as many heads, or
    fewer heads, each of which several heads of queries share."""
    made_of = (q.shape, k.shape, q.tobytes(), k.tobytes())
    for known, found in _last:
        if known == made_of:
            return found
    found = _products(q, k)
    _last.append((made_of, found))
    return found


def _products(q: F32, k: F32) -> Products:
    with np.errstate(all="ignore"):
        wide, keys = q.astype(np.float64), for_each_head(k, q.shape[1])
        size_q, size_k = np.abs(wide), np.abs(keys)
        raw, size = wide @ keys.swapaxes(-1, -2), size_q @ size_k.swapaxes(-1, -2)
        sums = size_q.sum(-1)[..., None] + size_k.sum(-1)[..., None, :]
    return Products(wide, keys, raw, size, sums)


def for_each_head(x: F32, heads: int) -> F64:
    """Keys or values in float64, with a shared head repeated for each head of queries."""
    share, wide = heads // x.shape[1], x.astype(np.float64)
    return wide if share == 1 else np.repeat(wide, share, axis=1)
