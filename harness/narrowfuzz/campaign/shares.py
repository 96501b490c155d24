"""Who has had which share of a worker's seconds.

A recipe, backend or model that is twenty times as slow as others on this machine would take nearly
all the time if cases were dealt: it gets as many seconds as they do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from narrowfuzz.case.spec import Spec

#: So many times the others' mean share may be spent, and so many seconds in any case.
_TIMES, _ALWAYS = 2.0, 2.0


@dataclass
class Shares:
    """Seconds by recipe and backend, and by model, on a ``clock``."""

    clock: Callable[[], float]
    spent: dict[str, defaultdict[Hashable, float]] = field(default_factory=dict)

    def overspent(self, spec: Spec) -> bool:
        """Has one of the Spec's kinds had more than its share?"""
        return any(self._too_much(name, value) for name, value in _kinds(spec))

    def pay(self, spec: Spec, serve: Callable[[], None]) -> None:
        """``serve``, and write its seconds down."""
        started = self.clock()
        serve()
        for name, value in _kinds(spec):
            self.spent.setdefault(name, defaultdict(float))[value] += self.clock() - started

    def _too_much(self, name: str, value: Hashable) -> bool:
        spent: Mapping[Hashable, float] = self.spent.get(name, {})
        others = [seconds for other, seconds in spent.items() if other != value]
        if not others:
            return False
        mean = sum(others) / len(others)
        return spent.get(value, 0.0) > _ALWAYS + _TIMES * mean


def _kinds(spec: Spec) -> tuple[tuple[str, Hashable], ...]:
    """Single linears have slices of their own."""
    if spec.model == "linear":
        return (("recipe of a linear", (spec.recipe, spec.backend)),)
    return ("recipe of a model", (spec.recipe, spec.backend)), ("model", spec.model)
