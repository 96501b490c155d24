"""Checks on every call of every module of a user's model: which module's output differs first, and
which gradients are missing with good reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
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

#: Number of other inputs with which a module that was not called may be called.
_OTHER_INPUTS = 8


def at_its_module(program: Program, tensors: dict[str, F32], verdict: Verdict) -> Verdict:
    """The verdict, placed at the first module whose output differs although its inputs agree.

    A checkpointed arm's recompute is compared with its forward; otherwise two runs are compared,
    the second named by the verdict's expectation. The verdict is returned unchanged where there is
    no such module or a run fails.
    """
    calls = program.watched(tensors)[1]
    again = verdict.expect.at.run if isinstance(verdict.expect, Same) else ""
    recomputes = program.arm.recomputes
    pairs = repeated(calls, _alike) if recomputes else _same_calls(calls, program, tensors)
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
    """Pairs of a call of a first run and the same call of another run of the same program."""
    others = {(c.module, c.index): c for c in program.watched(tensors)[1]}
    for call in calls:
        if (call.module, call.index) in others:
            yield call, others[call.module, call.index]


def _difference(first: Call, later: Call) -> tuple[int, ...] | None:
    """The index of the first element in which the outputs of two calls with equal inputs differ;
    None if there is none or the inputs differ."""
    x, y = first.outputs.get("output"), later.outputs.get("output")
    if x is None or y is None or x.shape != y.shape or not x.is_floating_point():
        return None
    if not _alike(first, later):
        return None
    bad = ~_same(_rows(x), _rows(y))
    return tuple(bad.nonzero()[0].tolist()) if bad.any() else None


def _alike(first: Call, later: Call) -> bool:
    """Do two calls of a module get the same tensors?"""
    given = first.tensors.keys() | later.tensors.keys()
    for name in given - {"grad_output"}:
        a, b = first.tensors.get(name), later.tensors.get(name)
        if a is None or b is None or a.shape != b.shape or not _same(a, b).all():
            return False
    return True


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y) | ((x != x) & (y != y))


def _rows(t: torch.Tensor) -> torch.Tensor:
    """[..., C] as fp32 [rows, C], as scripts compare results."""
    return (t.flatten(0, -2) if t.dim() > 1 else t).float()


def may_be_missing(
    program: Program, tensors: dict[str, F32], names: frozenset[str]
) -> frozenset[str]:
    """Those of the gradients ``names`` that the unconverted model of this ``program`` does not
    produce on the same tensors either, for a good reason: the module that they belong to was not
    called (an expert without tokens, a branch that is not taken), or its output got no gradient.

    One of torch's modules that ran, and whose output got a gradient, must produce gradients of its
    parameters: where it does not, the model itself has lost them, which is no excuse. Unless they
    were frozen while it ran: a model may freeze a critic for one loss.
    """
    trace, calls = program.watched(tensors)
    if trace.error is not None or trace.unusable_because:
        return names
    reached = {
        f"{call.module}.{parameter}.grad"
        for call in calls
        if "grad_output" in call.tensors
        for parameter in call.trained
    }
    modules = program.modules()

    def lost(name: str) -> bool:
        owner = name_of(name).module
        return name in reached and _of_torch(modules[owner]) and not taken(name)

    def taken(name: str) -> bool:
        # hooks that add gradients up elsewhere clear them: Megatron's main_grad
        parameter = program.parameters()[name.removesuffix(".grad")]
        return bool(parameter._post_accumulate_grad_hooks)

    return frozenset(n for n in names if n not in trace.outputs and not lost(n))


def _of_torch(module: nn.Module) -> bool:
    """Is this one of torch's modules, or of a class that is derived from one?"""
    kinds = (kind for kind in type(module).__mro__ if kind is not nn.Module)
    return any(kind.__module__.startswith("torch.nn.modules.") for kind in kinds)


def not_called_on(
    program: Program, tensors: dict[str, F32], names: frozenset[str]
) -> frozenset[str]:
    """Those of the gradients ``names`` whose module the converted model of this ``program`` does
    not call on these tensors, but calls with other inputs: the model chooses by values, which a
    conversion rounds (an expert without rows, an early exit). A module that it never calls is no
    excuse: a conversion may hide it."""
    called = _called(program, tensors)
    idle = {name for name in names if called and name_of(name).module not in called}
    chosen: set[str] = set()
    for seed in range(_OTHER_INPUTS if idle else 0):
        chosen |= _called(program, tensors | {"input": _another(program, tensors["input"], seed)})
    return frozenset(name for name in idle if name_of(name).module in chosen)


def _called(program: Program, tensors: dict[str, F32]) -> frozenset[str]:
    """The names of all modules that an eager run calls; empty if it fails."""
    return frozenset(call.module for call in program.watched(tensors)[1])


def _another(program: Program, example: F32, seed: int) -> F32:
    """Other token ids or features of the same shape, which are finite."""
    random = np.random.default_rng(seed)
    if program.description.takes_ids:
        return random.permuted(example.reshape(-1)).reshape(example.shape)
    return random.standard_normal(example.shape).astype(np.float32)
