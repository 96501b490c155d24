"""What a worker has spent its seconds on, so that nothing takes nearly all of them.

A compiled slice may take ten times as long as an eager one, and a recipe twenty times as long as
another on this machine: with as many cases for each, the slow ones would take most of a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from narrowfuzz.case.spec import Spec

#: No compiled slice begins while compiled ones have had more than this share of the time of slices:
#: one while slices have taken less than ``_FIRST_SECONDS``, as the compiler would take most of a
#: run's first minute, and one later, when eager slices show little that is new.
_FIRST_SECONDS, _FIRST_SHARE, _LATER_SHARE = 120.0, 0.5, 0.75
#: Seconds that an eager recipe and backend, or model, may have: this multiple of the others' mean,
#: plus this constant.
_TIMES, _ALWAYS = 2.0, 2.0


@dataclass
class TimeSpent:
    """Seconds of one worker, as measured on a ``clock``."""

    clock: Callable[[], float]
    #: False if the number of cases is given: then no clock steers what is drawn.
    limits: bool
    #: Seconds of compiled slices (True), and of others.
    slices: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    #: Seconds of eager cases of converted models: by recipe and backend, and by model.
    eager: dict[str, defaultdict[Hashable, float]] = field(default_factory=dict)

    @contextmanager
    def on_slice(self, compiled: bool) -> Iterator[None]:
        """Count the seconds of the block for a slice."""
        started = self.clock()
        yield
        self.slices[compiled] += self.clock() - started

    @contextmanager
    def on_eager(self, spec: Spec) -> Iterator[None]:
        """Count the seconds of the block for the Spec's recipe and backend, and for its model."""
        started = self.clock()
        yield
        for name, value in _kinds(spec):
            self.eager.setdefault(name, defaultdict(float))[value] += self.clock() - started

    def compiled_overspent(self) -> bool:
        """Have compiled slices had more than their share of the time so far?"""
        whole = sum(self.slices.values())
        share = _FIRST_SHARE if whole < _FIRST_SECONDS else _LATER_SHARE
        return self.limits and self.slices[True] > share * whole

    def eager_overspent(self, spec: Spec) -> bool:
        """Has the Spec's recipe and backend, or its model, had much more time than the others?"""
        return self.limits and any(self._too_much(name, value) for name, value in _kinds(spec))

    def _too_much(self, name: str, value: Hashable) -> bool:
        spent: Mapping[Hashable, float] = self.eager.get(name, {})
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
