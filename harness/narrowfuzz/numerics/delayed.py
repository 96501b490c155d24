"""The reference state machine of delayed scaling: the scale and history required after each event.

Stated from the recipe's data, independently of any library's code. One *slot* is one tensor of one
layer (input, weight or output gradient); its state is a scale and a window of past maxima.

The rules, with where they are published:

* A tensor is quantised with the scale that was in effect before it was seen; its max|x| is
  *staged*, as a maximum with the value already staged (TransformerEngine: ``amax`` is an atomic
  maximum).
* A *commit* takes the staged maximum into the window and makes the next scale
  ``fmax / amax / 2^margin``, amax being the window's maximum or its newest entry. An amax of 0, Inf
  or NaN keeps the old scale; a quotient past fp32 is fp32's largest value
  (common/recipe/delayed_scaling.cu; pytorch/fp8.py for the tensor by tensor path).
* Forward slots commit when the outermost autocast region ends, output gradients once in the
  backward pass. A slot that was not used since the last commit keeps its state
  (TransformerEngine PR 825); a recompute stages and commits nothing (PR 24, PR 1254); nor does a
  forward without an autograd graph.

The window is an array in the library's order: cell 0 is the staging cell; a commit shifts all cells
down by one, the oldest (cell 1) falls out, and cell 0 is cleared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from narrowfuzz.numerics.formats import F32

FP32_MAX = np.float32(np.finfo(np.float32).max)
#: Largest finite values.
FMAX = {"e4m3": np.float32(448.0), "e5m2": np.float32(57344.0)}


@dataclass(frozen=True)
class Policy:
    """A delayed-scaling recipe as data."""

    history: int
    algorithm: Literal["max", "most_recent"]
    margin: int
    #: Element formats of forward tensors and of output gradients.
    forward: Literal["e4m3", "e5m2"]
    backward: Literal["e4m3", "e5m2"]
    #: True: a commit also shifts the window of a slot whose staged maximum is 0. The bulk kernel
    #: does not do this, the tensor by tensor path does.
    rolls_on_zero: bool = False
    #: True: the quotient is computed as fmax times the reciprocal of amax, rounded twice, as torch
    #: does where a number is divided by a tensor.
    reciprocal: bool = False
    #: Which backward pass commits output gradients: every one, or only the one that runs through
    #: the first forward of its region.
    backward_commits: Literal["each", "first"] = "each"


@dataclass(frozen=True)
class Slot:
    """State of one tensor: a scale and its window of maxima, fp32 [history]."""

    scale: np.float32
    window: F32

    def __str__(self) -> str:
        return f"scale {self.scale:.8g} window {' '.join(f'{x:.4g}' for x in self.window)}"

    def equals(self, other: Slot) -> bool:
        """True if both are equal bit for bit."""
        return self.key() == other.key()

    def key(self) -> tuple[bytes, bytes]:
        """The bits of scale and window."""
        return np.float32(self.scale).tobytes(), self.window.tobytes()


def fresh(history: int) -> Slot:
    """The initial state of a slot: scale 1, and a window of zeros."""
    return Slot(np.float32(1.0), np.zeros(history, np.float32))


def resized(slot: Slot, history: int) -> Slot:
    """The slot under another window length: the oldest maxima are dropped, or empty cells are added
    as the oldest.

    The staging cell stays, and the newest maxima keep their distance from the window's end.
    """
    kept = min(history, len(slot.window)) - 1
    window = np.zeros(history, np.float32)
    window[0] = slot.window[0]
    window[history - kept :] = slot.window[len(slot.window) - kept :]
    return replace(slot, window=window)


def cut(slot: Slot, history: int) -> Slot:
    """The slot under another window length, resized at the wrong end: the newest maxima are
    dropped."""
    kept = min(history, len(slot.window))
    window = np.zeros(history, np.float32)
    window[:kept] = slot.window[:kept]
    return replace(slot, window=window)


def staged(slot: Slot, amax: np.float32) -> Slot:
    """The slot after its tensor was quantised again, with the maximum ``amax``; NaN is ignored."""
    window = slot.window.copy()
    window[0] = np.fmax(window[0], amax)
    return replace(slot, window=window)


def committed(slot: Slot, policy: Policy, fmax: np.float32) -> Slot:
    """The slot after one commit. Unchanged if the staged maximum is 0 and the policy does not roll
    on zero."""
    if slot.window[0] == 0 and not policy.rolls_on_zero:
        return slot
    amax = slot.window.max() if policy.algorithm == "max" else slot.window[0]
    window = np.roll(slot.window, -1)
    window[0] = 0
    return Slot(_next_scale(slot.scale, amax, policy, fmax), window)


def _next_scale(old: np.float32, amax: np.float32, policy: Policy, fmax: np.float32) -> np.float32:
    if not np.isfinite(amax) or amax <= 0:
        return old
    with np.errstate(over="ignore"):
        inverse = np.float32(np.float32(1.0) / amax)
        quotient = np.float32(fmax * inverse) if policy.reciprocal else np.float32(fmax / amax)
        quotient = np.float32(np.ldexp(quotient, -policy.margin))
    return quotient if np.isfinite(quotient) else FP32_MAX
