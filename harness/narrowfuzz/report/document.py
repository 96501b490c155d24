"""``--json``: one document on standard output, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def told(
    json: bool, do: Callable[[], T], tell: Callable[[T], None], plain: Callable[[T], Any]
) -> T:
    """``do`` it, and say what came of it: to people, or as ``plain`` data."""
    with _aside() if json else contextlib.nullcontext():
        done = do()
    if json:
        _write(plain(done))
    else:
        tell(done)
    return done


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """What anyone prints meanwhile goes to stderr: this process, libraries, workers, a user's
    model."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _write(value: Any) -> None:
    """The document, with a field's name in the same place each time."""
    print(json.dumps(value, indent=2, sort_keys=True))
