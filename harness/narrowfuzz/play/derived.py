"""Results that are made of what an operator's call was given and returned. Whoever reads what an
operator is imports this without torch, and scripts are pasted from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def parameter_again(
    tensors: Mapping[str, Any], results: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameter, which is held to a second bound."""
    return {"bounded_param": results["param"]}
