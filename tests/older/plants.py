"""A user's faults and controls, as 0.1.0 read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from narrowfuzz import Control, Fault


@contextmanager
def _larger() -> Iterator[None]:
    import torch

    plain = torch.nn.functional.linear
    torch.nn.functional.linear = lambda *args: plain(*args) * 1.125  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.linear = plain  # type: ignore[assignment]


FAULTS = [
    Fault("larger", "gain", "F.linear is an eighth too large", "no report", ("torch.*",), _larger),
    Fault(
        id="larger-compiled",
        family="gain",
        title="the same, compiled",
        link="no report",
        recipes=("torch.bf16",),
        plant=_larger,
        compiled=True,
        wild_shapes=False,
    ),
]

CONTROLS = [
    Control(
        id="as-it-is",
        title="nn.Linear",
        why="docs/rules.md, Bounds",
        recipes=("torch.fp32",),
        models=("linear",),
        arms=("eager*",),
    )
]
