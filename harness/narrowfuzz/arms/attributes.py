"""Finds out which attributes of modules and parameters are read while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from narrowfuzz.arms.program import Program
from narrowfuzz.numerics.formats import F32
from narrowfuzz.trace.trace import Change

#: (name of a module or parameter, name of its attribute).
Attribute = tuple[str, str]


def still_read(change: Change, read: frozenset[Attribute]) -> Change | None:
    """A change of the census reduced to those of its attributes that are in ``read``; None if none
    of them is."""
    if not change.attributes:
        return change
    used = tuple(a for a in change.attributes if (change.parameter or change.module, a) in read)
    if change.kind == "training flag changed":
        return change if used else None
    text = f"{change.parameter}: {', '.join(used)}" if change.parameter else ", ".join(used)
    return replace(change, before=text, attributes=used) if used else None


def lost_by(changes: Iterable[Change]) -> frozenset[Attribute]:
    """The attributes that these changes of the census removed or changed."""
    return frozenset((c.parameter or c.module, a) for c in changes for a in c.attributes)


def read_of(
    program: Program, tensors: dict[str, F32], wanted: frozenset[Attribute]
) -> frozenset[Attribute]:
    """Those of the ``wanted`` attributes that a run of this unconverted ``program`` reads or tests
    for; all of them if the run fails."""
    if program.error is not None:
        return wanted
    read: set[Attribute] = set()
    objects = {**program.modules(), **program.parameters()}
    for name in {name for name, _ in wanted} & objects.keys():
        attributes = frozenset(a for of, a in wanted if of == name)
        _listen(objects[name], attributes, lambda a, name=name: read.add((name, a)))  # type: ignore[misc]
    trace = program.run(tensors, tap=False)
    return wanted if trace.error is not None or trace.unusable_because else frozenset(read)


def _listen(held: Any, attributes: frozenset[str], note: Callable[[str], Any]) -> None:
    """Make this object call ``note`` with the name of any of these attributes that is read. The
    object gets a subclass of its class for that."""
    kind: Any = type(held)

    def reading(self: Any, name: str) -> Any:
        if name in attributes:
            note(name)
        return kind.__getattribute__(self, name)

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    held.__class__ = type(kind)(kind.__name__, (kind,), {**named, "__getattribute__": reading})
