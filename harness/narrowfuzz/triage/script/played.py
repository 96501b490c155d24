"""Writes the played scripts (repro.py): the player's own source, specialised to the runs of the
script, then literal data, the runs and a check.

The scripts of a model in one process (``model.py``), a model on ranks (``ranks.py``) and a
library's own layers (``layers.py``) are described by a ``Played``, which becomes text here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.job import NAMESPACE
from narrowfuzz.triage.script.parts import docstring, guarded
from narrowfuzz.triage.script.paste import Source, defined_in, definitions_of, named_in, pasted


@dataclass(frozen=True)
class Played:
    """A script that plays one or more runs and checks their traces."""

    verdict: Verdict
    recipe: str
    #: What it runs, for its docstring.
    title: str
    #: Imports and settings for the ``tail``.
    head: str
    #: The player's function that every run calls, and the modules that its source comes from.
    entry: str
    sources: tuple[Source, ...]
    #: Names in that source -> the source text of the constants that replace them; and the arguments
    #: that each run passes instead.
    constants: Mapping[str, str]
    varying: Sequence[str]
    #: Returns the source of the recipe and of the models, given the names that the player's source
    #: uses.
    library: Callable[[Collection[str]], Sequence[str]]
    #: Data, runs and check.
    tail: str
    environment: Mapping[str, str] = field(default_factory=dict)
    #: True where the recipe's source uses the player's records, as a subject's functions do.
    shares: bool = False


def write_played_script(played: Played) -> str:
    """The script's text. Raises ValueError if the recipe defines a name that scripts define."""
    defined = defined_in(played.sources)
    used = named_in(played.tail) & defined

    def ours() -> str:
        names = (played.entry, *sorted(used))
        return pasted(names, played.sources, played.constants, played.varying)

    theirs = played.library(named_in(ours()))
    own = frozenset().union(*map(definitions_of, theirs))
    if played.shares:
        used |= frozenset().union(*map(named_in, theirs)) & defined - own
    text = ours()
    if clash := definitions_of(text) & own:
        raise ValueError(f"{played.recipe} defines what scripts do, too: rename {sorted(clash)}")
    return guarded(
        docstring(played.verdict, played.title),
        played.head,
        NAMESPACE * bool(played.varying),
        *theirs,
        text,
        played.tail,
        environment=played.environment,
    )
