"""The derivatives of a user's own ``autograd.Function``s, once for each model, not for each case:
they rest on no data of one."""

from __future__ import annotations

import math

from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play.derivatives import derivatives
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.trace.meaning import shortened
from narrowfuzz.trace.trace import Derivative, message_of

_FOUND: dict[tuple[str, str, str], tuple[Derivative, ...]] = {}


def derivatives_of(spec: Spec, device: str) -> tuple[Derivative, ...]:
    """Of every Function that a user's unconverted model calls, where it was asked for a gradient;
    one that says why, where the model does not run on numbers of ours. None of other models."""
    if not MODELS[spec.model].own:
        return ()
    key = spec.model, spec.dtype, device
    if key not in _FOUND:
        own = MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)
        try:
            _FOUND[key] = tuple(Derivative(*one) for one in derivatives(own, ids_of(spec)))
        except Exception as error:  # noqa: BLE001 - a user's code, and what it raised is told
            said = f"{type(error).__name__}: {shortened(message_of(error).strip(), 200)}"
            why = f"a forward on normal numbers raised {said}"
            _FOUND[key] = (Derivative("the model", "", "", why, *(math.nan,) * 6, 0),)
    return _FOUND[key]


def ids_of(spec: Spec) -> int:
    """How many token ids there are, 0 where the input is features."""
    return spec.n if MODELS[spec.model].takes_ids else 0
