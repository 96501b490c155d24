"""O24: the backward of a user's own ``autograd.Function`` is the derivative of its forward.

Comparing arms does not reveal a wrong backward, since it is wrong on all of them.
``play/derivatives.py`` explains how the error of finite differences is measured, and which
Functions are not judged because their backward may be intended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.rules.datum import Datum
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import DerivativeOf, bits, number
from narrowfuzz.trace.trace import Derivative
from narrowfuzz.trace.verdict import Status, Verdict

NAME, ROLE = "O24", "backward"


def _falsified(
    found: tuple[Derivative, ...], change: Callable[[NDArray[Any]], NDArray[Any]]
) -> tuple[Derivative, ...] | None:
    if not found:
        return None
    slopes = change(np.asarray([[one.backward for one in found]], np.float32))[0]
    pairs = zip(found, slopes, strict=True)
    return tuple(replace(one, backward=float(slope)) for one, slope in pairs)


#: Derivatives of a user's own autograd.Functions.
DERIVATIVES: Datum[tuple[Derivative, ...]] = Datum("a Function's backward", _falsified)


def check_own_functions(evidence: Evidence) -> Iterator[Verdict]:
    """One verdict for each Function: at its first argument with a wrong derivative, else at the
    first that could not be judged. The model is the same on every arm, so only one arm is judged.
    """
    arm = evidence.base
    by_function: dict[str, list[Derivative]] = {}
    for one in evidence.datum(DERIVATIVES) or ():
        by_function.setdefault(one.function, []).append(one)
    if not by_function:
        yield plain(NAME, arm, ROLE, "not_applicable", "it calls no autograd.Function of its own")
    for several in by_function.values():
        yield _judge(arm, several)


def _judge(arm: str, several: list[Derivative]) -> Verdict:
    shown = next((d for d in several if d.wrong), None)
    shown = shown or next((d for d in several if d.why), several[0])
    at = At(what="function", layer=shown.module, name=shown.argument)
    others = tuple(d.argument for d in several if d.wrong and d is not shown)
    expect = DerivativeOf(
        shown.function,
        bits(shown.slope),
        bits(shown.error),
        bits(shown.off),
        bits(shown.share),
        shown.directions,
        others,
    )
    if not shown.wrong:
        status: Status = "inconclusive" if shown.why else "ok"
        place = f"{shown.function}({shown.argument})" if shown.argument else shown.function
        why = f"{place}: {shown.why}" if shown.why else ""
        return Verdict(NAME, arm, ROLE, status, at=at, expect=expect, why=why)
    symptom = f"of {shown.function} is not the derivative of its forward"
    far = abs(shown.backward - shown.slope) / shown.allowed
    return diverged(NAME, arm, ROLE, symptom, at, number(shown.backward), expect, factor=far)
