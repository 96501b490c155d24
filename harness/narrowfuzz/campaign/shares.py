"""Shares out a worker's seconds among recipes, backends and models.

If each got as many cases as the others, one that is twenty times as slow on this machine would take
nearly all the time: instead each gets about as many seconds as the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from narrowfuzz.case.spec import Spec

#: Seconds that may be spent: this multiple of the others' mean, plus this constant.
_TIMES, _ALWAYS = 2.0, 2.0


@dataclass
class Shares:
    """Seconds spent by recipe and backend, and by model, as measured on a ``clock``."""

    clock: Callable[[], float]
    spent: dict[str, defaultdict[Hashable, float]] = field(default_factory=dict)

    def overspent(self, spec: Spec) -> bool:
        """Has the Spec's recipe and backend, or its model, had more than its share?"""
        return any(self._too_much(name, value) for name, value in _kinds(spec))

    def pay(self, spec: Spec, serve: Callable[[], None]) -> None:
        """Call ``serve``, and add the seconds it takes."""
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
    """(name, value) of what the Spec's seconds count for. Single linears count separately, as they
    have slices of their own."""
    if spec.model == "linear":
        return (("recipe of a linear", (spec.recipe, spec.backend)),)
    return ("recipe of a model", (spec.recipe, spec.backend)), ("model", spec.model)
