"""Records of the player as source text of a script.

What is alike in all of its runs is put into the pasted source; the rest is handed over by each run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

#: What a script imports to hand over a record.
NAMESPACE = "import types\n"
#: Field, with dots -> its value as source text.
Texts = Mapping[str, str]


def texts(name: str, record: Any) -> dict[str, str]:
    """Every field and property of a record that a script calls ``name``, those of records in it as
    well."""
    found: dict[str, str] = {}
    names = [f.name for f in fields(record)]
    names += [n for n, x in vars(type(record)).items() if isinstance(x, property | cached_property)]
    for field in names:
        value, place = getattr(record, field), f"{name}.{field}"
        found |= texts(place, value) if is_dataclass(value) else {place: repr(value)}
    return found


def shared(runs: Sequence[Texts]) -> dict[str, str]:
    """What all runs have alike."""
    return {n: text for n, text in runs[0].items() if all(r.get(n) == text for r in runs)}


def handed(
    runs: Sequence[Texts], constants: Mapping[str, str]
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """What is put into the pasted source, the ``constants`` as they are given, and the arguments
    by which each run hands over the rest."""
    given = [keywords(run, constants) for run in runs]
    roots = {root: "None" for root in ("job", "taps") if root not in given[0]}
    return dict(constants) | roots, given


def keywords(run: Texts, constants: Collection[str]) -> dict[str, str]:
    """The arguments by which a run hands over what is not among the ``constants``."""
    own = {name: text for name, text in run.items() if name not in constants}
    roots = dict.fromkeys(name.partition(".")[0] for name in own)
    return {root: _nested(root, own) for root in roots}


def _nested(name: str, own: Texts) -> str:
    if name in own:
        return own[name]
    start = f"{name}."
    fields = [n.removeprefix(start).partition(".")[0] for n in own if n.startswith(start)]
    given = ", ".join(f"{f}={_nested(start + f, own)}" for f in dict.fromkeys(fields))
    return f"types.SimpleNamespace({given})"
