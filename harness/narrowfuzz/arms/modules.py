"""Every module of a user's model, call by call: whose own output differs first, and which have
parameters that no gradient reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import torch
from torch import nn

from narrowfuzz.arms.program import Program
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.layers import Call
from narrowfuzz.play.names import name_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Same
from narrowfuzz.trace.trace import repeated
from narrowfuzz.trace.verdict import Verdict


def at_its_module(program: Program, tensors: dict[str, F32], verdict: Verdict) -> Verdict:
    """The same divergence at the module whose own output differs first while what it was given
    agrees: between forward and recompute, or, of a rule that repeats a run (its expectation names
    that one), between two runs. Unchanged where there is no such module, or the runs fail."""
    calls = program.watched(tensors)[1]
    again = verdict.expect.at.run if isinstance(verdict.expect, Same) else ""
    pairs = repeated(calls) if program.arm.recomputes else _same_calls(calls, program, tensors)
    for first, later in sorted(pairs, key=lambda pair: pair[1].ended):
        index = _difference(first, later)
        if index is not None:
            break
    else:
        return verdict
    got, want = (float(_rows(c.outputs["output"])[index]) for c in (later, first))
    there = At(
        layer=later.module,
        call=later.index,
        phase=later.phase,  # type: ignore[arg-type]
        name="output",
        index=index,
    )
    before = msgspec.structs.replace(there, call=first.index, phase="forward")
    if not program.arm.recomputes:
        before = msgspec.structs.replace(before, run=again)
    return replace(verdict, at=there, got=f"{got:.9g}", expect=Same(before, f"{want:.9g}"))


def _same_calls(
    calls: Iterable[Call], program: Program, tensors: dict[str, F32]
) -> Iterator[tuple[Call, Call]]:
    """Each call of a run behind the same call of another run of the same program."""
    others = {(c.module, c.index): c for c in program.watched(tensors)[1]}
    for call in calls:
        if (call.module, call.index) in others:
            yield call, others[call.module, call.index]


def _difference(first: Call, later: Call) -> tuple[int, ...] | None:
    """Where the first output differs of two calls that were given the same; None: nowhere, or they
    were given something else."""
    x, y = first.outputs.get("output"), later.outputs.get("output")
    if x is None or y is None or x.shape != y.shape or not x.is_floating_point():
        return None
    given = first.tensors.keys() | later.tensors.keys()
    for name in given - {"grad_output"}:
        a, b = first.tensors.get(name), later.tensors.get(name)
        if a is None or b is None or a.shape != b.shape or not _same(a, b).all():
            return None
    bad = ~_same(_rows(x), _rows(y))
    return tuple(bad.nonzero()[0].tolist()) if bad.any() else None


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y) | ((x != x) & (y != y))


def _rows(t: torch.Tensor) -> torch.Tensor:
    """As scripts look at a result: in fp32, all but the last dimension as one."""
    return (t.flatten(0, -2) if t.dim() > 1 else t).float()


def excused(program: Program, tensors: dict[str, F32], names: frozenset[str]) -> frozenset[str]:
    """Of these gradients, those that the unconverted model of this ``program`` does not leave on
    the same tensors, either, and has no need to: nothing called the module that they belong to (an
    expert without tokens, a branch that is not taken), or no gradient came back to it.

    A module of torch's own kind that ran, and whose output got a gradient, leaves one for its
    parameters: where it does not, the model itself has lost it.
    """
    trace, calls = program.watched(tensors)
    if trace.error is not None or trace.void:
        return names
    reached = {call.module for call in calls if "grad_output" in call.tensors}
    modules = program.modules()

    def lost(name: str) -> bool:
        owner = name_of(name).module
        return owner in reached and owner in modules and _of_torch(modules[owner])

    return frozenset(n for n in names if n not in trace.outputs and not lost(n))


def _of_torch(module: nn.Module) -> bool:
    """Is this one of torch's modules, or of a class that is derived from one?"""
    kinds = (kind for kind in type(module).__mro__ if kind is not nn.Module)
    return any(kind.__module__.startswith("torch.nn.modules.") for kind in kinds)
