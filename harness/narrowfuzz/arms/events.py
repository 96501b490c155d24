"""What may happen to a program between two runs of the same data without changing the result."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch

from narrowfuzz.arms.program import Program, run_error
from narrowfuzz.numerics.formats import F32
from narrowfuzz.trace import Trace


def run_after(event: str, program: Program, tensors: dict[str, F32]) -> Trace:
    """The tapped run of ``tensors`` after ``event``; "" is none. What the library raises in the
    event is the Trace's error."""
    if not event or program.error is not None:
        return program.run(tensors, tap=True)
    return _EVENTS[event](program, tensors)


def _steps(program: Program, tensors: dict[str, F32]) -> Trace:
    """Two optimiser steps with lr = 0: one clears the gradients, one leaves zeros to add to."""
    trace = program.run(tensors, tap=False)
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.0)
    for to_none in (True, False):
        if trace.error is not None:
            return trace
        try:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        except Exception as error:
            return Trace(program.arm.name, error=run_error(error, "convert"))
        trace = program.run(tensors, tap=True, load=False)
    return trace


def _reload(program: Program, tensors: dict[str, F32], *, weights_only: bool = True) -> Trace:
    """Run, save the state, build the layer anew, load, run: as a resumed training does."""
    before = program.run(tensors, tap=False)
    if before.error is not None:
        return before
    fresh = Program(program.spec, program.recipe, program.arm, device=program.device)
    try:
        file = io.BytesIO()
        torch.save(program.model.state_dict(), file)
        file.seek(0)
        fresh.model.load_state_dict(torch.load(file, weights_only=weights_only))
    except Exception as error:
        return Trace(program.arm.name, error=run_error(error, "convert"))
    return fresh.run(tensors, tap=True, load=False)


def _reload_trusted(program: Program, tensors: dict[str, F32]) -> Trace:
    """As ``_reload``, with a file whose pickled classes are trusted."""
    return _reload(program, tensors, weights_only=False)


_EVENTS: dict[str, Callable[[Program, dict[str, F32]], Trace]] = {
    "steps": _steps,
    "reload": _reload,
    "reload_trusted": _reload_trusted,
}
