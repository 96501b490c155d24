"""What is planted in a process: a fault, or a legal rewrite of a control.

    python -m narrowfuzz.planted DEVICE FILE ID SCRIPT

runs a script under it. FILE is "" for what is built in; ID is ``control:<id>`` for a rewrite, ""
plants nothing.
"""

from __future__ import annotations

import hashlib
import runpy
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from narrowfuzz.controls.registry import find_control
from narrowfuzz.device import begin
from narrowfuzz.faults.registry import find_fault


def identity(file: str, name: str) -> str:
    """Tells what is planted apart from all else that compiled artefacts are cached for."""
    content = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return f"{content}:{name}"


def planted(file: str, name: str) -> AbstractContextManager[object]:
    """The context in which it is planted. Raises ValueError if there is no such thing."""
    if not name:
        return nullcontext()
    kind, _, control_id = name.rpartition(":")
    if not kind:
        fault = find_fault(file, name)
        if all(glob.startswith("te.") for glob in fault.recipes):
            from te_on_cpu.environment import enter

            enter()  # whoever plants in TransformerEngine may import it
        return fault.plant()
    assert kind == "control", name
    return find_control(file, control_id).plant()


def main(device: str, file: str, name: str, script: str) -> None:
    """Plant, then run the script as __main__; its exit code is ours."""
    begin(device)
    with planted(file, name):
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
