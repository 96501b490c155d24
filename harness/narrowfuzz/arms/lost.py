"""Errors that are not about a library's arithmetic: a lost device, a device without free memory,
and our own failure to read a library's calls or state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from narrowfuzz.numerics.accumulator import Unjudged

#: Exit code of a process that has lost its device.
EXIT_LOST = 75


class DeviceLost(BaseException):
    """The device of this process has stopped working. A BaseException, so that no ``except
    Exception`` catches it."""


class CannotRecord(Exception):
    """Our recorder failed to read a library's call or state: a mistake of ours or of a recipe, not
    an error of the library, even if it is raised through the library's code."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns exceptions inside into CannotRecord, except for Unjudged, which states why a call is
    not judged."""
    try:
        yield
    except Unjudged:
        raise
    except Exception as error:
        raise CannotRecord(f"{what} cannot be read: {error!r}") from error


def out_of_memory(error: BaseException) -> bool:
    """True for an error after which other cases can run once memory has been freed."""
    typed = isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
    return typed or isinstance(error, torch.OutOfMemoryError)


#: Messages about a single call that the device rejected; it continues to work.
_OF_A_CALL = ("invalid argument", "invalid configuration")


def raise_if_lost(error: BaseException, device: str) -> None:
    """Raises DeviceLost if the ``device`` no longer works after this error. The type of the error
    does not matter: a library's kernels can break the device under many types."""
    if out_of_memory(error):
        return
    if isinstance(error, torch.AcceleratorError):
        if not any(words in str(error) for words in _OF_A_CALL):
            raise DeviceLost(str(error)) from error
        return
    if device != "cpu":
        try:
            torch.cuda.synchronize()
        except RuntimeError as late:
            raise DeviceLost(str(late)) from error
