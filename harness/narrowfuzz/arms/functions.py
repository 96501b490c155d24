"""The derivatives of a user's own ``autograd.Function``s, once for each model, not for each case:
they rest on no data of one."""

from __future__ import annotations

from narrowfuzz.case import Spec
from narrowfuzz.catalog import MODELS
from narrowfuzz.play.derivatives import derivatives
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.trace import Derivative

_FOUND: dict[tuple[str, str, str], tuple[Derivative, ...]] = {}


def derivatives_of(spec: Spec, device: str) -> tuple[Derivative, ...]:
    """Of every Function that the unconverted model calls, where it was asked for a gradient."""
    key = spec.model, spec.dtype, device
    if key not in _FOUND:
        own = MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)
        _FOUND[key] = tuple(Derivative(*one) for one in derivatives(own, ids_of(spec)))
    return _FOUND[key]


def ids_of(spec: Spec) -> int:
    """How many token ids there are, 0 where the input is features."""
    return spec.n if MODELS[spec.model].takes_ids else 0
