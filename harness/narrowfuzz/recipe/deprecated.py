"""Old names in files that users wrote, and in what they type: what each is called now.

What still works says so once, as a warning; what no longer does is refused with what to write
instead. Where modules are now stands in ``moved.py``; docs/compatibility.md says what is promised.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

#: The release in which the old names go.
GOES = "0.2.0"


class Deprecated(DeprecationWarning):
    """An old name, which still works."""


#: Name in ``narrowfuzz`` -> the module that still has it, and what to write.
NAMES = {
    "Control": ("plants.older", "narrowfuzz.Plant with legal=True, where `why` is `source`"),
    "Fault": ("plants.older", "narrowfuzz.Plant, where `link` is `source`"),
    "Stateful": ("recipe.older", "narrowfuzz.Recipe, with dtypes=('bf16',) if none was given"),
}
#: List that a file defines -> what it is called.
LISTS = {"CONTROLS": "PLANTS", "FAULTS": "PLANTS"}
#: Argument of ``narrowfuzz list`` -> what it is called.
LISTINGS = {"oracles": "rules"}

_SCRIPT = "leave it out: scripts are made of the source of convert, tap and converted"
#: Name in ``narrowfuzz`` that is gone -> what to do without it.
GONE = {"ScriptText": _SCRIPT}
#: Record -> field that it no longer takes -> what to write.
FIELDS = {
    "Recipe": {
        "autocasts": "write autocast, a function of (device) that returns the tensors it rounds",
        "may_refuse": "write refusal, a function of (spec, device)",
        "script": _SCRIPT,
    },
    "Stateful": {
        "may_refuse": "write refusal, a function of (spec, device)",
        "script": "leave it out: scripts are made of the source of the subject's functions",
    },
    "Plant": {"link": "write source", "why": "write source"},
    "Entry": {
        "case": "leave it out: the predicates of `when` say which cases it is about",
        "fingerprints": "write [[matches]] with fingerprints = [...]",
        "link": "write links = [...]",
        "severity": "write symptom, effect, data and use, of which it follows",
    },
}
#: Record -> field -> what the function in it is called with, where that was less before.
ARGUMENTS = {
    "Recipe": {
        "convertible": ("module", "name", "spec"),
        "refusal": ("spec", "device"),
        "subject": ("device",),
        "unavailable": ("backend", "device"),
    },
}


def warn(old: str, new: str, stacklevel: int = 2) -> None:
    """Say what to write for an old name; ``stacklevel`` is that of ``warnings.warn``."""
    sentence = f"{old} is deprecated and goes in narrowfuzz {GOES}: use {new}"
    warnings.warn(sentence, Deprecated, stacklevel=stacklevel + 1)


def refused_field(record: str, field: str) -> str:
    """What to write for a field that a record no longer takes; "" if it never took it."""
    instead = FIELDS.get(record, {}).get(field)
    return f"the field {field!r} of {record} is gone: {instead}" if instead else ""


def refused_keyword(error: str) -> str:
    """The same of Python's own words for a keyword that a record does not take."""
    found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", error)
    return refused_field(*found.groups()) if found else ""


def refused_arguments(record: object) -> str:
    """What to write for a function of a record that takes fewer arguments than it is called with
    now; "" if all take them."""
    for field, arguments in ARGUMENTS.get(type(record).__name__, {}).items():
        taken = inspect.signature(getattr(record, field))
        try:
            taken.bind(*arguments)
        except TypeError:
            names = ", ".join(taken.parameters)
            return f"{field} takes ({names}): write it to take ({', '.join(arguments)})"
    return ""


def definitions(defined: dict[str, Any], name: str, file: object) -> Any:
    """What a file defines under this name, or under older ones; None if under none."""
    if name in defined:
        return defined[name]
    older = [old for old, new in LISTS.items() if new == name and old in defined]
    for old in older:
        warn(f"{old} in {file}", name)
    lists = [defined[old] for old in older]
    if not lists or not all(isinstance(one, list | tuple) for one in lists):
        return None
    return [item for one in lists for item in one]
