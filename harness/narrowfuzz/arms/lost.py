"""Errors of a device: one that is lost, or has no memory left, says nothing of a library's
arithmetic."""

from __future__ import annotations

import torch

#: Exit code of a process that has lost its device.
EXIT_LOST = 75


class DeviceLost(BaseException):
    """This process computes no more on its device; no ``except Exception`` may go on."""


def out_of_memory(error: BaseException) -> bool:
    """True where another case may run once memory has been given back."""
    typed = isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
    return typed or isinstance(error, torch.OutOfMemoryError)


def device_lost(error: BaseException) -> bool:
    """True where nothing runs any more on the process's device. A library's own complaint, such as
    CUBLAS_STATUS_NOT_SUPPORTED, has another type."""
    return isinstance(error, torch.AcceleratorError) and not out_of_memory(error)
