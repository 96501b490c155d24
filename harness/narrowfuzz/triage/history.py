"""What a case needs of the cases before it: state that outlives a model, ids of dead ones, caches.

A divergence that a worker sees and no fresh process shows may hang on what that worker ran before.
So a fresh process runs the worker's last cases and then this one, and with ever fewer of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from narrowfuzz.case import Case, dump_case, load_case
from narrowfuzz.triage.verify import GONE, SHOWN, RunScript

#: Cases that a worker remembers.
REMEMBERED = 40
#: Seconds that all of them may take in a fresh process.
_ONCE = 60.0

_SCRIPT = """\
import sys
from pathlib import Path
from narrowfuzz.triage.history import show
sys.exit(show({case!r}, {wanted!r}, [Path(file) for file in {files!r}]))
"""


def with_history(
    case: Case,
    wanted: str,
    past: Sequence[Case],
    scripts: RunScript,
    *,
    plant: tuple[str, str] | None = None,
    files: Sequence[Path] = (),
    seconds: float = 60.0,
) -> Case | None:
    """The case with as few of the ``past`` cases as show ``wanted`` in a fresh process; None if all
    of them do not, or none are needed. ``files`` are recipe files; after ``seconds`` no fewer are
    looked for."""

    def shows(history: Sequence[Case], limit: float = _ONCE) -> bool:
        candidate = msgspec.structs.replace(case, history=tuple(history))
        text = _SCRIPT.format(
            case=dump_case(candidate), wanted=wanted, files=[str(file) for file in files]
        )
        with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as folder:
            path = Path(folder) / "history.py"
            path.write_text(text)
            return scripts(path, timeout=limit, plant=plant).shown

    if shows(()):
        return None
    same = [c for c in past if c.spec.recipe == case.spec.recipe]
    # the same recipe's first: scripts play them
    start = next((some for some in (same, list(past)) if some and shows(some)), None)
    if start is None:
        return None
    until = time.monotonic() + seconds

    def in_time(history: Sequence[Case]) -> bool:
        return shows(history, max(1.0, until - time.monotonic()))

    kept = fewest(start, in_time, until)
    # luck would have it either way: without them never, with them each time
    if shows(()) or not shows(kept):
        return None
    return msgspec.structs.replace(case, history=tuple(kept))


def fewest(
    cases: Sequence[Case], shows: Callable[[Sequence[Case]], bool], until: float
) -> list[Case]:
    """A part of ``cases`` that still ``shows`` and of which none can be left out, in their order;
    a larger one where time ran out."""
    kept, size = list(cases), max(1, len(cases) // 2)
    while True:
        start, dropped = 0, False
        while start < len(kept) and time.monotonic() < until:
            rest = kept[:start] + kept[start + size :]
            if rest and shows(rest):
                kept, dropped = rest, True
            else:
                start += size
        if time.monotonic() >= until or (size == 1 and not dropped):
            return kept
        size = max(1, size // 2)


def show(raw: bytes, wanted: str, files: Sequence[Path]) -> int:
    """1 if this process sees ``wanted`` on the case, else 0: what a fresh process runs."""
    from narrowfuzz.environment import settle
    from narrowfuzz.judge import Judge
    from narrowfuzz.ledger import Ledger
    from narrowfuzz.recipe import load_recipes, load_stateful

    settle()
    judge = Judge(load_recipes(files), Ledger([]), stateful=load_stateful(files))
    return GONE if judge.judge(load_case(raw)).cause(wanted) is None else SHOWN
