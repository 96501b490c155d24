"""``--json``: one document on standard output, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def aside() -> Iterator[None]:
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


def write_document(value: Any) -> None:
    """The document, with a field's name in the same place each time."""
    print(json.dumps(value, indent=2, sort_keys=True))
