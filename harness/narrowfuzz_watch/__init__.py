"""Finds the first bad value (NaN, infinity, huge number) of a real training: run
``narrowfuzz watch -- COMMAND``, or write in a program

    with narrowfuzz.watch() as watched:
        train()
    print(watched.report)

The module itself can be called, and is importable without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowfuzz_watch.records import Report

#: Environment variables that ``narrowfuzz watch`` sets for its command: the folder of records,
#: "full" or "", and what :mod:`narrowfuzz_watch.removed` disables.
FOLDER, FULL = "NARROWFUZZ_WATCH_FOLDER", "NARROWFUZZ_WATCH_FULL"
REMOVE = "NARROWFUZZ_WATCH_REMOVE"


class Watched:
    """The folder of records and, once the block has ended, the report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report: Report | None = None


@contextmanager
def watched(
    out: str | os.PathLike[str] | None = None,
    *,
    full: bool = False,
    against: str | os.PathLike[str] | None = None,
) -> Iterator[Watched]:
    """Watch this thread. The report is in ``report`` and in ``out``/first_bad.json.

    ``full`` records a digest of every operator's operands and results; ``against`` is the folder of
    such a run to compare with. On several ranks all name the same ``out``; each writes a report of
    what all have recorded by then, so the last rank's is complete. Under ``narrowfuzz watch`` this
    does nothing, as the whole command is watched already.
    """
    if os.environ.get(FOLDER):
        yield Watched(Path(os.environ[FOLDER]))
        return
    from narrowfuzz_watch.inside import begin, end
    from narrowfuzz_watch.read import RECORDS, prepared, reported

    folder = prepared(None if out is None else Path(out), fresh=False)
    earlier = None if against is None else Path(against)
    found = Watched(folder)
    begin(folder / RECORDS, full or earlier is not None)
    try:
        yield found
    finally:
        end()
        found.report = reported(folder, earlier)


class _Called(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return watched(*args, **kwargs)


sys.modules[__name__].__class__ = _Called
