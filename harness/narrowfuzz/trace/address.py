"""The address of a tensor, an element or an event in a run, as verdicts, findings and scripts use.

It is defined in ``narrowfuzz_watch``, which uses the same addresses for trainings and must not
import this package.
"""

from __future__ import annotations

from typing import Literal

from narrowfuzz_watch.address import At, AtPhase, Side, What, parse

__all__ = ["At", "AtPhase", "Phase", "Side", "What", "parse"]

#: The phases in which a GEMM or a layer call can happen.
Phase = Literal["forward", "recompute", "backward"]
