"""Finding controls: the built-in ones and those of a user's control file."""

from __future__ import annotations

import runpy
from pathlib import Path

from harness.controls.control import Control
from harness.recipe import unknown


def builtin_controls() -> dict[str, Control]:
    """All built-in controls by id."""
    from harness.controls import plain, rewrites_float8, rewrites_mx, rewrites_torch, schedules

    kinds = (plain, rewrites_torch, rewrites_float8, rewrites_mx, schedules)
    return {control.id: control for kind in kinds for control in kind.CONTROLS}


def load_control_file(file: Path) -> dict[str, Control]:
    """Controls of a user's file. Raises ValueError naming the file if it cannot be used."""
    if not file.is_file():
        raise ValueError(f"control file {file} does not exist")
    try:
        found = runpy.run_path(str(file)).get("CONTROLS")
    except (Exception, SystemExit) as error:
        raise ValueError(f"control file {file} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, list | tuple) or not all(isinstance(c, Control) for c in found):
        raise ValueError(f"control file {file} must define CONTROLS, a list of Control")
    return {control.id: control for control in found}


def find_control(file: str, control_id: str) -> Control:
    """The control with this id, from a control file or, with "", from the built-in ones."""
    controls = load_control_file(Path(file)) if file else builtin_controls()
    if control_id not in controls:
        raise ValueError(unknown("control", control_id, controls))
    return controls[control_id]
