"""Which linears of a model train in float8."""

from __future__ import annotations

from typing import Any


def wanted(module: Any, name: str) -> bool:
    """Not the layer behind attention, and none whose sides no FP8 kernel takes."""
    fits = module.in_features % 16 == 0 and module.out_features % 16 == 0
    return fits and name.rpartition(".")[2] != "wo"
