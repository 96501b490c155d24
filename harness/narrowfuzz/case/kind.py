"""The kinds of case. Code that treats them differently reads the kind, or has a table with a row
for each: what the rules are applied to (``rules/applied.py``), what the judge runs
(``judge/observe.py``), how triage shows a case and makes it smaller (``triage/forms.py``).
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
    #: True for the Specs whose cases are of this kind, unless an earlier kind in ``KINDS`` matches.
    matches: Callable[[Spec], bool]
    #: True: the linears of the model are observed and judged one by one. False: the case is a
    #: single linear, run once, and every rule applies to it.
    judges_each_linear: bool = True
    #: Its layout over ranks.
    layout: Layout = ONE


def _on_ranks(layout: Layout) -> Kind:
    return Kind(layout.name, lambda spec: layout_of(spec) is layout, layout=layout)


#: Models of a library's own layers, judged event by event, in one process and on ranks.
LAYERS = Kind("layers", lambda spec: bool(spec.layer))
#: Converted models on ranks, one kind per layout.
ON_RANKS = tuple(_on_ranks(layout) for layout in LAYOUTS if layout is not ONE)
#: Converted models in one process: a single linear, and all others.
LINEAR = Kind("linear", lambda spec: spec.direct, judges_each_linear=False)
MODEL = Kind("model", lambda spec: True)

KINDS = (LAYERS, *ON_RANKS, LINEAR, MODEL)
CONVERTED = (LINEAR, MODEL)
#: Kinds whose ranks form groups that share rows and linears.
MESHES = tuple(kind for kind in ON_RANKS if not kind.layout.single_group)
#: Kinds whose ranks each hold some of several copies of the model in a row.
IN_STAGES = tuple(kind for kind in ON_RANKS if kind.layout.chained)
#: Kinds whose ranks all hold the same one model.
ONE_MODEL = tuple(kind for kind in ON_RANKS if not kind.layout.chained)
#: Kinds that may run twice, with threads and with processes as ranks.
THREADS_OR_PROCESSES = tuple(kind for kind in ON_RANKS if kind.layout.processes)
#: Kinds whose ranks may be compiled.
COMPILABLE = tuple(kind for kind in ON_RANKS if kind.layout.compiles)
#: Kinds that are compared, within a tolerance, with a float64 run of one process.
APPROXIMATE = tuple(kind for kind in ON_RANKS if kind.layout.approximate)


def kind_of(spec: Spec) -> Kind:
    """The kind of this Spec's cases."""
    return next(kind for kind in KINDS if kind.matches(spec))
