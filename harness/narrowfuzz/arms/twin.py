"""The float64 twin of a model: unquantised, never compiled, on the same data and events.

It is the reference for everything but the quantised GEMMs, which have a reference of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from narrowfuzz.arms.jobs import job_of
from narrowfuzz.arms.model_names import ties
from narrowfuzz.arms.tensors import host
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.play.converted import play
from narrowfuzz.play.job import Taps
from narrowfuzz.play.kernels import eagerly
from narrowfuzz.play.player import Trace


def twin_outputs(spec: Spec, tensors: dict[str, F32]) -> dict[str, F64]:
    """The results of the Spec's events in float64, under the names that a Trace uses. Empty where a
    user's model does not run in float64, or an operation is not implemented for it."""
    model, job = MODELS[spec.model], job_of(spec, EAGER, "cpu")
    job = replace(job, dtype="float64", autocast=False, tied=ties(spec))
    try:
        with eagerly():
            run = play(
                Trace(),
                lambda: model.build(spec, dtype=torch.float64, device="cpu"),
                {name: torch.from_numpy(x.astype(np.float64)) for name, x in tensors.items()},
                job=job,
                taps=Taps(),
            )
    except Exception as error:
        # the twin may be the only run that reaches an operation that is not implemented: eager
        # skips a step that overflows
        if not model.own and not isinstance(error, NotImplementedError):
            raise
        return {}
    return {name: host(t) for name, t in run.results.items()}
