"""Recompute that is not the forward it repeats."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Fault
from harness.faults.patching import float8_forward, in_backward

_FLOAT8 = ("torchao.float8.*",)


def _drifted(forward: Any, layer: Any, input: Any) -> Any:
    """In recompute the layer sees its input moved by one part in sixteen."""
    return forward(layer, input * (1.0 + 2.0**-4) if in_backward() else input)


FAULTS = [
    Fault("recompute-drifts", "recompute", "recompute rounds its input differently",
          "https://github.com/pytorch/pytorch/issues/150859", _FLOAT8,
          lambda: float8_forward(_drifted)),
]  # fmt: skip
