"""The kinds of case. Whoever runs, judges or shows each in its own way asks the kind, or has a row
for it: rules what they are applied to (``rules/applied.py``), the judge what it runs
(``judge/observe.py``), triage how a case is shown and made smaller (``triage/forms.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrowfuzz.case import layout
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


#: A library's own layers, which are judged event by event, in one process and on ranks.
LAYERS = Kind("layers", lambda spec: bool(spec.layer))
#: Models that a recipe converts on ranks: stages of a pipeline, which share the rows of each
#: sequence, or which share data and linears.
PIPELINE = Kind("pipeline", lambda spec: layout.layout_of(spec) is layout.PIPELINE)
CONTEXT = Kind("context", lambda spec: layout.layout_of(spec) is layout.CONTEXT)
MESH = Kind("mesh", lambda spec: layout.layout_of(spec) is layout.MESH)
#: Those in one process: a single linear, and all others.
LINEAR = Kind("linear", lambda spec: spec.direct, one_by_one=False)
MODEL = Kind("model", lambda spec: True)

KINDS = (LAYERS, PIPELINE, CONTEXT, MESH, LINEAR, MODEL)
CONVERTED = (LINEAR, MODEL)
ON_RANKS = (MESH, PIPELINE, CONTEXT)


def kind_of(spec: Spec) -> Kind:
    """The kind of the cases of this Spec."""
    return next(kind for kind in KINDS if kind.asked(spec))
