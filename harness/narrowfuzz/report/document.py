"""``--json``: one JSON document on standard output, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def run_and_print(
    json: bool, do: Callable[[], T], show: Callable[[T], None], plain: Callable[[T], Any]
) -> T:
    """Call ``do`` and return its result, after printing it: as the JSON of ``plain(result)``, or
    for people with ``show(result)``."""
    with _aside() if json else contextlib.nullcontext():
        done = do()
    if json:
        _write(plain(done))
    else:
        show(done)
    return done


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Redirect standard output to stderr, whoever prints: this process, libraries, workers, a
    user's model."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _write(value: Any) -> None:
    """Print the document, with its fields in sorted order, so that it is the same each time."""
    print(json.dumps(value, indent=2, sort_keys=True))
