"""The float64 twin of a model: unquantised, never compiled, on the same data and events.

It is the reference for everything but the quantised GEMMs; those have one of their own.
"""

from __future__ import annotations

import numpy as np
import torch

from narrowfuzz.arms.tensors import host
from narrowfuzz.arms.training import events_of, playing
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.play.converted import play
from narrowfuzz.play.player import Trace


def twin_outputs(spec: Spec, tensors: dict[str, F32]) -> dict[str, F64]:
    """What the Spec's events give in float64, under the names a Trace uses; nothing of a user's
    model that names a precision itself and does not run in another."""
    how, model = playing(spec, EAGER, "cpu") | {"autocast": False}, MODELS[spec.model]
    try:
        run = play(
            Trace(),
            lambda: model.build(spec, dtype=torch.float64, device="cpu"),
            lambda model: model,
            {name: torch.from_numpy(x.astype(np.float64)) for name, x in tensors.items()},
            events_of(spec),
            dtype=torch.float64,
            **how,
        )
    except Exception:
        if not model.own:
            raise
        return {}
    return {name: host(t) for name, t in run.results.items()}
