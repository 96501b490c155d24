"""Finding controls: the built-in ones and those of a user's control file."""

from __future__ import annotations

from pathlib import Path

from narrowfuzz.content import load_definitions
from narrowfuzz.controls.control import Control
from narrowfuzz.recipe import unknown


def builtin_controls() -> dict[str, Control]:
    """All built-in controls by id."""
    from narrowfuzz.controls import (
        hopper,
        plain,
        rewrites_float8,
        rewrites_mx,
        rewrites_torch,
        schedules,
    )

    kinds = (plain, rewrites_torch, rewrites_float8, rewrites_mx, schedules, hopper)
    return {control.id: control for kind in kinds for control in kind.CONTROLS}


def load_control_file(file: Path) -> dict[str, Control]:
    """Controls of a user's file. Raises ValueError naming the file if it cannot be used."""
    found = load_definitions(file, "control", "CONTROLS", (Control,))
    return {control.id: control for control in found}


def find_control(file: str, control_id: str) -> Control:
    """The control with this id, from a control file or, with "", from the built-in ones."""
    controls = load_control_file(Path(file)) if file else builtin_controls()
    if control_id not in controls:
        raise ValueError(unknown("control", control_id, controls))
    return controls[control_id]
