"""Errors that name the features that the CPU emulation lacks, so that nothing is silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class UnsupportedByEmulation(NotImplementedError):
    """The real library can do this; the CPU emulation of its extension cannot."""


def refuse(what: str, instead: str = "") -> NoReturn:
    """Raise UnsupportedByEmulation for ``what``, a function, recipe or option; ``instead`` is a
    remedy."""
    remedy = f"; {instead}" if instead else ""
    raise UnsupportedByEmulation(
        f"the CPU emulation of TransformerEngine does not carry {what}{remedy}"
    )


def refused(name: str) -> Callable[..., Any]:
    """A stand-in for the extension's function ``name``; it raises UnsupportedByEmulation."""

    def stand_in(*_args: object, **_kwargs: object) -> NoReturn:
        refuse(f"the extension function {name}")

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in
