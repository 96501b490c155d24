"""Perturbations of each kind of observation that rules of converted models read (``Rule.reads``). A
rule that notices none of them is vacuous. Data that only one rule reads define how they are
falsified themselves (``rules/datum.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from narrowfuzz.power.falsify import AMAX, CODES, INFINITE, LOST, NUMBERS, SCALES
from narrowfuzz.power.perturbation import (
    Falsified,
    Perturbation,
    changed_unasked,
    mute,
    of_rerun,
    of_trace,
    operands,
    operators,
    outputs,
    raised,
    recomputed,
    recomputed_tensors,
    second_copies,
    statistics,
    without_output,
)
from narrowfuzz.rules.rule import Reads
from narrowfuzz.trace.trace import Trace


def _each(
    of: str,
    what: Callable[..., Trace | None],
    kinds: Iterable[Any],
    *,
    made: Callable[[str, str, Falsified], Perturbation] = of_trace,
    **which: Any,
) -> tuple[Perturbation, ...]:
    """One perturbation for each kind of false numbers or operands."""
    return tuple(made(kind.name, of, partial(what, kind, **which)) for kind in kinds)


#: Kind of observation that rules of converted models read -> its perturbations.
FALSIFIES: dict[Reads, tuple[Perturbation, ...]] = {
    "run": (
        of_trace("no end", "run", raised),
        of_trace("no message", "refusal", mute),
        of_trace("missing", "output", without_output),
    ),
    "conversion": (of_trace("changed unasked", "conversion", changed_unasked),),
    "results": _each("results", outputs, NUMBERS),
    "finite": _each("results", outputs, (LOST, INFINITE)),
    "nan": _each("results", outputs, (LOST,)),
    "bias gradient": _each("bias gradient", outputs, NUMBERS, names=("grad_bias",)),
    "operands": _each("operands", operands, CODES),
    "scales": _each("scales", operands, SCALES),
    "amax": _each("amax", operands, AMAX),
    "second copies": _each("second copies", second_copies, CODES + SCALES),
    "recomputed": (
        *_each("recomputed operands", recomputed, CODES + SCALES),
        *_each("recomputed input", recomputed_tensors, NUMBERS),
    ),
    "statistics": tuple(
        perturbation
        for name in ("lse", "out", "q", "k", "v")
        for perturbation in _each(f"attention's {name}", statistics, NUMBERS, name=name)
    ),
    "operators": _each("operators' results", operators, NUMBERS),
    "results again": _each("results again", outputs, NUMBERS, made=of_rerun),
    "operands again": _each("operands again", operands, CODES, made=of_rerun),
    "scales again": _each("scales again", operands, SCALES, made=of_rerun),
}
