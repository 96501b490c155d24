"""The checks of a user's own ``autograd.Function``s by finite differences, once for each model and
not for each case, as they do not use a case's data."""

from __future__ import annotations

import math

from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play.derivatives import derivatives
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.trace.meaning import shortened
from narrowfuzz.trace.trace import WHOLE_MODEL, Derivative, message_of

_FOUND: dict[tuple[str, str, str], tuple[Derivative, ...]] = {}


def derivatives_of(spec: Spec, device: str) -> tuple[Derivative, ...]:
    """The derivatives of every Function that a user's unconverted model calls. If the model fails
    on generated inputs, a single one whose ``why`` states the error. Empty for models that are not
    a user's."""
    if not MODELS[spec.model].own:
        return ()
    key = spec.model, spec.dtype, device
    if key not in _FOUND:
        own = MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)
        try:
            _FOUND[key] = tuple(Derivative(*one) for one in derivatives(own, ids_of(spec)))
        except Exception as error:  # noqa: BLE001 - a user's code; its error is reported
            message = f"{type(error).__name__}: {shortened(message_of(error).strip(), 200)}"
            why = f"the forward failed on normally distributed inputs: {message}"
            _FOUND[key] = (Derivative(WHOLE_MODEL, "", "", why, *(math.nan,) * 6, 0),)
    return _FOUND[key]


def ids_of(spec: Spec) -> int:
    """The number of different token ids, 0 where the input is features."""
    return spec.n if MODELS[spec.model].takes_ids else 0
