"""What a run says of the ``autograd.Function``s of a user's model: how many were checked, and of
which nothing can be said, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from narrowfuzz.rules.own_functions import NAME
from narrowfuzz.trace.expect import DerivativeOf
from narrowfuzz.trace.verdict import Verdict

#: The first word of a count's key.
_KEY = "function"


def functions_seen(verdicts: Iterable[Verdict]) -> set[tuple[str, ...]]:
    """("function", module.qualname, status, why) for each that was tried."""
    return {
        (_KEY, verdict.expect.function, verdict.status, verdict.why)
        for verdict in verdicts
        if verdict.oracle == NAME and isinstance(verdict.expect, DerivativeOf)
    }


def said_of_functions(counts: Iterable[Any]) -> str:
    """The sentence, of all keys that were counted; "" where there was no Function."""
    keys = [key for key in counts if isinstance(key, tuple) and key[0] == _KEY]
    reasons = sorted({why for _, _, _, why in keys if why})
    unclear = {function for _, function, _, why in keys if why}
    checked = {function for _, function, _, why in keys if not why} - unclear
    if not keys:
        return ""
    many = f"{len(checked)} autograd.Function{'s' * (len(checked) != 1)} of your own"
    held = f"{'was' if len(checked) == 1 else 'were'} held to finite differences"
    said = f"{many} {held}"
    return f"{said}; not checked: {'; '.join(reasons)}" if reasons else said
