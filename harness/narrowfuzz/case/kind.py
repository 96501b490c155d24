"""The kinds of case. Whoever runs, judges or shows each in its own way asks the kind, or has a row
for it: rules what they are applied to (``rules/applied.py``), the judge what it runs
(``judge/observe.py``), triage how a case is shown and made smaller (``triage/forms.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrowfuzz.case.layout import LAYOUTS, ONE, Layout, layout_of
from narrowfuzz.case.spec import Spec


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of case."""

    name: str
    #: Is a Spec's case of it, and of no kind before it in ``KINDS``?
    asked: Callable[[Spec], bool]
    #: Its linears are watched, and judged, one by one; False: one linear, run once, is all there
    #: is, and every rule applies to it.
    one_by_one: bool = True
    #: How ranks share it.
    layout: Layout = ONE


def _on_ranks(layout: Layout) -> Kind:
    return Kind(layout.name, lambda spec: layout_of(spec) is layout, layout=layout)


#: A library's own layers, which are judged event by event, in one process and on ranks.
LAYERS = Kind("layers", lambda spec: bool(spec.layer))
#: Models that a recipe converts on ranks, a kind for each layout.
ON_RANKS = tuple(_on_ranks(layout) for layout in LAYOUTS if layout is not ONE)
#: Those in one process: a single linear, and all others.
LINEAR = Kind("linear", lambda spec: spec.direct, one_by_one=False)
MODEL = Kind("model", lambda spec: True)

KINDS = (LAYERS, *ON_RANKS, LINEAR, MODEL)
CONVERTED = (LINEAR, MODEL)
#: Ranks in groups, which share data and linears; that have some of several models in a row; that
#: all have the one model; that may be threads and processes; that may be compiled; and that are
#: compared with a float64 run of one process, within a tolerance.
MESHES = tuple(kind for kind in ON_RANKS if not kind.layout.together)
IN_STAGES = tuple(kind for kind in ON_RANKS if kind.layout.chained)
ALIKE = tuple(kind for kind in ON_RANKS if not kind.layout.chained)
TWICE = tuple(kind for kind in ON_RANKS if kind.layout.processes)
COMPILABLE = tuple(kind for kind in ON_RANKS if kind.layout.compiles)
APPROXIMATE = tuple(kind for kind in ON_RANKS if kind.layout.approximate)


def kind_of(spec: Spec) -> Kind:
    """The kind of the cases of this Spec."""
    return next(kind for kind in KINDS if kind.asked(spec))
