"""Writes the short scripts (repro.py) of a single call: its data as literals, the call, and a check
of what it returns.

The scripts of a single linear (``linear.py``), an operator (``operator.py``), a conversion
(``census.py``) and an autograd.Function (``function.py``) are described by a ``Short``, which
becomes text here; all others are played (``played.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.parts import docstring, guarded


@dataclass(frozen=True)
class Short:
    """A script that makes one call and checks its results."""

    verdict: Verdict
    #: What it runs, for its docstring.
    title: str
    #: Imports and settings for the ``parts``.
    head: str
    #: Data, sources, the call and the check, in this order.
    parts: tuple[str, ...]


def write_short_script(short: Short) -> str:
    """The script's text."""
    return guarded(docstring(short.verdict, short.title), short.head, *short.parts)
