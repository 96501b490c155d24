"""Errors that say nothing of a library's arithmetic: of a device that is lost, or has no memory
left, and our own in reading what a library does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Exit code of a process that has lost its device.
EXIT_LOST = 75


class DeviceLost(BaseException):
    """This process computes no more on its device; no ``except Exception`` may go on."""


class Unread(Exception):
    """We cannot read a library's call or state: a mistake of ours or of a recipe's, and no error of
    the library's, whoever's code it passes."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """What is raised inside is our mistake, but for a ValueError, which says why it is not read."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise Unread(f"{what} cannot be read: {error!r}") from error


def out_of_memory(error: BaseException) -> bool:
    """True where another case may run once memory has been given back."""
    typed = isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
    return typed or isinstance(error, torch.OutOfMemoryError)


#: What a device says of one call that it did not begin, and goes on after.
_OF_A_CALL = ("invalid argument", "invalid configuration")


def raise_if_lost(error: BaseException, device: str) -> None:
    """Raises DeviceLost if nothing runs any more on the process's ``device`` after this error,
    whoever raised it: a library's kernels lose it under many types."""
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
