"""repro.py of a single call: its data as literals, the call, and what is wrong in what it returns.

A single linear (``linear.py``), an operator (``operator.py``), a conversion (``census.py``) and an
autograd.Function (``function.py``) say what they run by a ``Short``, which becomes text here; all
else is played (``played.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.parts import docstring, guarded


@dataclass(frozen=True)
class Short:
    """A script that calls one thing and checks what comes of it."""

    verdict: Verdict
    #: What its docstring says that it runs.
    title: str
    #: What ``parts`` import and set.
    head: str
    #: Data, sources, the call and the check, in this order.
    parts: tuple[str, ...]


def write_short_script(short: Short) -> str:
    """The script's text."""
    return guarded(docstring(short.verdict, short.title), short.head, *short.parts)
