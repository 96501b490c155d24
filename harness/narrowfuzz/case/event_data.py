"""What single events of a training run on, where that is not the case's own input and gradient."""

from __future__ import annotations

import numpy as np

from narrowfuzz.case.events import Backward, Forward, Stimulus, numbered
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import F32, FORMATS, round_to
from narrowfuzz.play.names import name_of

#: How far a spike stands out.
SPIKE = 2.0**12


def with_events(spec: Spec, tensors: dict[str, F32]) -> dict[str, F32]:
    """The tensors of a case whose events are those of ``spec``: input@<forward> and
    grad_output@<backward> for those that have their own, made of input and grad_output."""
    own = {name: x for name, x in tensors.items() if not name_of(name).number}
    for number, event in numbered(spec.training):
        if isinstance(event, Forward | Backward) and (event.values != "gaussian" or event.shift):
            name = "input" if isinstance(event, Forward) else "grad_output"
            x = stimulated(own[name], event.values, event.shift, spec.dtype)
            own[f"{name}@{number}"] = x
    return own


def stimulated(x: F32, values: Stimulus, shift: int, dtype: str) -> F32:
    """The tensor times 2^shift, or zeros; one element of it may stand out, or be infinite."""
    with np.errstate(over="ignore"):
        made = np.zeros_like(x) if values == "zero" else np.ldexp(x.astype(np.float64), shift)
    if values in ("spike", "inf") and x.size:
        most = np.max(np.abs(made), initial=0.0, where=np.isfinite(made))
        made.flat[31 % x.size] = np.inf if values == "inf" else SPIKE * most
    finite = np.isfinite(made)  # an infinity of the data stays one
    with np.errstate(over="ignore", invalid="ignore"):
        fits = round_to(made, FORMATS[dtype], overflow="saturate")
    return np.where(finite, fits, made).astype(np.float32)
