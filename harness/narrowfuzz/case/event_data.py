"""Inputs and output gradients of single events that differ from those of the case."""

from __future__ import annotations

import numpy as np

from narrowfuzz.case.events import Backward, Forward, Stimulus, numbered
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import F32, FORMATS, round_to
from narrowfuzz.play.names import name_of

#: A spike is this many times the largest finite magnitude of its tensor.
SPIKE = 2.0**12


def with_events(spec: Spec, tensors: dict[str, F32]) -> dict[str, F32]:
    """The case's tensors, with input@<forward> and grad_output@<backward> added for the events of
    ``spec`` that have data of their own, derived from input and grad_output."""
    own = {name: x for name, x in tensors.items() if not name_of(name).number}
    for number, event in numbered(spec.training):
        if isinstance(event, Forward | Backward) and (event.values != "gaussian" or event.shift):
            name = "input" if isinstance(event, Forward) else "grad_output"
            x = stimulated(own[name], event.values, event.shift, spec.dtype)
            own[f"{name}@{number}"] = x
    return own


def stimulated(x: F32, values: Stimulus, shift: int, dtype: str) -> F32:
    """The tensor times 2^shift, or zeros; for "spike" and "inf" one element is overwritten. Finite
    values saturate in ``dtype``."""
    with np.errstate(over="ignore"):
        made = np.zeros_like(x) if values == "zero" else np.ldexp(x.astype(np.float64), shift)
    if values in ("spike", "inf") and x.size:
        most = np.max(np.abs(made), initial=0.0, where=np.isfinite(made))
        made.flat[31 % x.size] = np.inf if values == "inf" else SPIKE * most
    finite = np.isfinite(made)  # an infinity in the data stays infinite
    with np.errstate(over="ignore", invalid="ignore"):
        fits = round_to(made, FORMATS[dtype], overflow="saturate")
    return np.where(finite, fits, made).astype(np.float32)
