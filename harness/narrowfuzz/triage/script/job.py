"""Writes the player's records as source text of a script.

Fields that are alike in all runs of the script are put into the pasted source as constants; each
run passes the others as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

#: The import that a script needs to pass a record.
NAMESPACE = "import types\n"
#: Dotted name of a field -> its value as source text.
Texts = Mapping[str, str]


def fields_as_text(name: str, record: Any) -> dict[str, str]:
    """All fields and properties of a record whose variable in the script is ``name``, including
    those of records inside it."""
    found: dict[str, str] = {}
    names = [f.name for f in fields(record)]
    names += [n for n, x in vars(type(record)).items() if isinstance(x, property | cached_property)]
    for field in names:
        value, place = getattr(record, field), f"{name}.{field}"
        found |= fields_as_text(place, value) if is_dataclass(value) else {place: repr(value)}
    return found


def common_fields(runs: Sequence[Texts]) -> dict[str, str]:
    """The fields that are alike in all runs."""
    return {n: text for n, text in runs[0].items() if all(r.get(n) == text for r in runs)}


def split_constants(
    runs: Sequence[Texts], constants: Mapping[str, str]
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The constants to put into the pasted source, which are these and None for a record that no
    run passes; and for each run the arguments by which it passes its other fields."""
    given = [keywords(run, constants) for run in runs]
    roots = {root: "None" for root in ("job", "taps") if root not in given[0]}
    return dict(constants) | roots, given


def keywords(run: Texts, constants: Collection[str]) -> dict[str, str]:
    """The arguments by which a run passes the fields that are not among the ``constants``."""
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
