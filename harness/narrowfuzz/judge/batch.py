"""Data draws of one Spec, made together: tensors, and the references that runs are compared
with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from narrowfuzz.case.spec import Case
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.operators.linear import Draws, Reference, Tensors

#: Elements of one operand, over all draws, that are computed at once: more leave a core's cache.
_ELEMENTS = 1 << 14


class Drawn(NamedTuple):
    """One draw: its tensors, and its reference if that was made together with those of others."""

    tensors: Tensors
    reference: Reference | None = None


def drawn_together(
    cases: Sequence[Case], plan: Plan, make: Callable[[Case], Tensors]
) -> dict[Case, Drawn]:
    """The draws of these cases, which share the Spec of a linear. References are computed when they
    are needed."""
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
