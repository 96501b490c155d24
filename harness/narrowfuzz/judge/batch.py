"""Draws of one Spec, made together: their tensors, and what rules hold their runs against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from narrowfuzz.case.spec import Case
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.operators.linear import Draws, Reference, Tensors

#: Elements of one operand that are worked on at once: more do not stay in a core's cache.
_ELEMENTS = 1 << 14


class Drawn(NamedTuple):
    """One draw: its tensors, and its reference where that was made with others'."""

    tensors: Tensors
    reference: Reference | None = None


def drawn_together(
    cases: Sequence[Case], plan: Plan, make: Callable[[Case], Tensors]
) -> dict[Case, Drawn]:
    """The draws of these cases of one linear; nothing of a reference is computed before it is asked
    for."""
    spec = cases[0].spec
    assert all(case.spec == spec for case in cases)
    largest = max(spec.tokens * spec.k, spec.tokens * spec.n, spec.k * spec.n, 1)
    several = max(1, _ELEMENTS // largest)
    drawn: dict[Case, Drawn] = {}
    for start in range(0, len(cases), several):
        some = cases[start : start + several]
        tensors = [make(case) for case in some]
        draws = Draws(plan, spec.dtype, tensors)
        for number, case in enumerate(some):
            drawn[case] = Drawn(tensors[number], Reference(draws, number))
    return drawn
