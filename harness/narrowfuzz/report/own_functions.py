"""What a run reports about the ``autograd.Function``s of a user's model: how many were checked, and
the reasons why others could not be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from narrowfuzz.report.tally import counted
from narrowfuzz.rules.own_functions import NAME
from narrowfuzz.trace.expect import DerivativeOf
from narrowfuzz.trace.trace import WHOLE_MODEL
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.trace.words import plural

#: The first word of a count's key.
_KEY = "function"


def functions_seen(verdicts: Iterable[Verdict]) -> set[tuple[str, ...]]:
    """("function", module.qualname, status, why) for each Function that a check was tried on."""
    return {
        (_KEY, verdict.expect.function, verdict.status, verdict.why)
        for verdict in verdicts
        if verdict.rule == NAME and isinstance(verdict.expect, DerivativeOf)
    }


def said_of_functions(counts: Iterable[Any]) -> str:
    """The sentence for a run with these counts; "" if there was no Function."""
    keys = counted(counts, _KEY)
    unclear = {function for function, _, why in keys if why}
    checked = {function for function, _, why in keys if not why} - unclear
    # an error's text may end in a full stop, and the sentence goes on
    reasons = sorted({why.rstrip(".") for _, _, why in keys if why})
    if not keys:
        return ""
    every = checked | unclear - {WHOLE_MODEL}
    if not every:
        return f"No autograd.Function of your own was looked for: {'; '.join(reasons)}"
    of = plural(len(every), "autograd.Function")
    text = f"Backward compared with finite differences: {len(checked)} of {of} of your own"
    return f"{text}; not compared: {'; '.join(reasons)}" if reasons else text
