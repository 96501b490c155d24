"""Recipes of controls: our delayed scaling, inclined to one kind of schedule."""

from __future__ import annotations

from dataclasses import replace

from narrowfuzz.models.delayed_subject import carries, subject
from narrowfuzz.schedule.carries import Carries
from narrowfuzz.stateful import Stateful


def _inclined(name: str, title: str, **to: object) -> Stateful:
    def inclined() -> Carries:
        return replace(carries(), **to)  # type: ignore[arg-type]

    return Stateful(
        name=f"control.delayed.{name}",
        family="reference.delayed",
        title=title,
        subject=subject,
        carries=inclined,
        dtypes=("bf16", "fp32"),
    )


RECIPES = [
    _inclined("reentrant", "reentrant checkpoints", checkpoints=("reentrant",)),
    _inclined("non_reentrant", "checkpoints that are not", checkpoints=("full",)),
    _inclined("most_recent", "the newest maximum", algorithms=("max", *["most_recent"] * 5)),
    _inclined("unfused", "tensor by tensor updates", unfused=True),
]
