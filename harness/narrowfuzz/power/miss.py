"""Measures why a planted fault was missed: cases are drawn, run with the fault and without it, and
judged if the fault changed something.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants import patching
from narrowfuzz.plants.registry import planted
from narrowfuzz.power.effect import Tried, digest
from narrowfuzz.power.record import Miss
from narrowfuzz.trace.verdict import BAD

#: Number of cases of each kind.
CASES = 60
#: The folder of the built-in faults, and its module that only finds the places to patch, which does
#: not count as a fault's own code.
_PLANTS, _PLACES = str(Path(patching.__file__).parent), patching.__file__


def miss_of(tried: Tried) -> Miss:
    """What drawn cases reveal about a missed fault, or why that could not be measured."""
    try:
        found = tried.answer(_measured)
    except TimeoutError as why:
        return Miss(problem=str(why))
    return found or Miss(problem="it ended the process that it was tried in")


def _measured(tried: Tried, number: int = CASES) -> Miss:
    ran = _Ran(tried.file)
    threading.setprofile(ran.note)  # for the threads of ranks, which start with the first case
    session, drawn = replace(tried, number=number).opened()
    judge = session.new_judge(Ledger([]))
    before = [digest(judge.run_arms(case)) for case in drawn]
    reached, changed, judged = 0, 0, 0
    seen: Counter[str] = Counter()
    judge = session.new_judge(Ledger([]))
    with planted(tried.file, tried.id):
        for case, clean in zip(drawn, before, strict=True):
            with ran.noted():
                outcome = digest(judge.run_arms(case))
            reached += ran.here
            if outcome == clean:
                continue
            changed += 1
            verdicts = judge.judge(case).verdicts
            judged += any(verdict.status in ("ok", *BAD) for verdict in verdicts)
            seen.update({verdict.rule for verdict in verdicts if verdict.status in BAD})
    rules = dict(sorted(seen.items()))
    return Miss(cases=len(drawn), ran=reached, changed=changed, judged=judged, seen=rules)


class _Ran:
    """Notes whether a fault's own code has run within ``noted()``, on this thread or on any other
    thread whose profile function is ``note``."""

    def __init__(self, file: str) -> None:
        self.of = file or _PLANTS
        self.here = False

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(self.of) and name != _PLACES:
            self.here = True

    @contextmanager
    def noted(self) -> Iterator[None]:
        self.here = False
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
