"""Handling of Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def on_interrupt(do: Callable[[], None]) -> Iterator[None]:
    """Call ``do`` on Ctrl-C and SIGTERM inside the block; afterwards restore the former
    handlers."""

    def handler(signum: int, frame: Any) -> None:
        do()

    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
