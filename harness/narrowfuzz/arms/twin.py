"""The float64 twin of a model: unquantised, never compiled, on the same data and events.

It is the reference for everything but the quantised GEMMs; those have one of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from narrowfuzz.arms.jobs import job_of
from narrowfuzz.arms.tensors import host
from narrowfuzz.arms.zoo import ties
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.play.converted import play
from narrowfuzz.play.job import Taps
from narrowfuzz.play.kernels import eagerly
from narrowfuzz.play.player import Trace


def twin_outputs(spec: Spec, tensors: dict[str, F32]) -> dict[str, F64]:
    """What the Spec's events give in float64, under the names a Trace uses; nothing of a user's
    model that names a precision itself and does not run in another, nor where a library lacks an
    operation."""
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
        # what a library lacks its float64 twin may meet alone: eager skips a step that overflows
        if not model.own and not isinstance(error, NotImplementedError):
            raise
        return {}
    return {name: host(t) for name, t in run.results.items()}
