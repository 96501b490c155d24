"""Old names in users' files and commands, and the new names that replace them.

An old name that still works causes one warning; one that no longer works is refused with a message
that states the replacement. ``moved.py`` has the new names of modules; docs/compatibility.md states
what is promised.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

#: The release in which the old names are removed.
GOES = "0.2.0"


class Deprecated(DeprecationWarning):
    """An old name, which still works."""


#: Old name in ``narrowfuzz`` -> the module that still has it, and what to write instead.
NAMES = {
    "Control": ("plants.legacy", "narrowfuzz.Plant with legal=True, where `why` is `source`"),
    "Fault": ("plants.legacy", "narrowfuzz.Plant, where `link` is `source`"),
    "Stateful": ("recipe.older", "narrowfuzz.Recipe, with dtypes=('bf16',) if none was given"),
}
#: Old name of a list that a file defines -> its new name.
LISTS = {"CONTROLS": "PLANTS", "FAULTS": "PLANTS"}
#: Old argument of ``narrowfuzz list`` -> its new name.
LISTINGS = {"oracles": "rules"}

_SCRIPT = "leave it out: scripts are made of the source of convert, tap and converted"
#: Removed name in ``narrowfuzz`` -> what to do without it.
GONE = {"ScriptText": _SCRIPT}
#: Record -> field that it no longer has -> what to write instead.
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
#: Record -> field -> arguments with which its function is called, where there were fewer before.
ARGUMENTS = {
    "Recipe": {
        "convertible": ("module", "name", "spec"),
        "refusal": ("spec", "device"),
        "subject": ("device",),
        "unavailable": ("backend", "device"),
    },
}


def warn(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn that ``old`` is deprecated and replaced by ``new``; ``stacklevel`` is that of
    ``warnings.warn``."""
    sentence = f"{old} is deprecated and goes in narrowfuzz {GOES}: use {new}"
    warnings.warn(sentence, Deprecated, stacklevel=stacklevel + 1)


def refused_field(record: str, field: str) -> str:
    """What to write instead of a field that a record no longer has; "" if it never had it."""
    instead = FIELDS.get(record, {}).get(field)
    return f"the field {field!r} of {record} is gone: {instead}" if instead else ""


def refused_keyword(error: str) -> str:
    """The same as ``refused_field``, for Python's message about an unexpected keyword."""
    found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", error)
    return refused_field(*found.groups()) if found else ""


def refused_arguments(record: object) -> str:
    """What to write for a function in a record that does not take the arguments with which it is
    called now; "" if all functions do."""
    for field, arguments in ARGUMENTS.get(type(record).__name__, {}).items():
        taken = inspect.signature(getattr(record, field))
        try:
            taken.bind(*arguments)
        except TypeError:
            names = ", ".join(taken.parameters)
            return f"{field} takes ({names}): write it to take ({', '.join(arguments)})"
    return ""


def definitions(defined: dict[str, Any], name: str, file: object) -> Any:
    """The value that a file defines under this name, or the lists under older names; None if there
    is neither."""
    if name in defined:
        return defined[name]
    older = [old for old, new in LISTS.items() if new == name and old in defined]
    for old in older:
        warn(f"{old} in {file}", name)
    lists = [defined[old] for old in older]
    if not lists or not all(isinstance(one, list | tuple) for one in lists):
        return None
    return [item for one in lists for item in one]
