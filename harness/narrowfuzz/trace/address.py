"""The one way to point at something that a run left: in a verdict, a finding, a script.

``narrowfuzz_watch`` points at what a training left in the same way and imports nothing of ours, so
an address is defined there.
"""

from __future__ import annotations

from typing import Literal

from narrowfuzz_watch.address import At, AtPhase, Side, What, parse

__all__ = ["At", "AtPhase", "Phase", "Side", "What", "parse"]

#: Of what was multiplied.
Phase = Literal["forward", "recompute", "backward"]
