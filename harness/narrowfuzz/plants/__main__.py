"""Run a script in a process in which a fault or legal rewrite is planted.

    python -m narrowfuzz.plants DEVICE FILE ID SCRIPT

FILE is "" for a built-in plant; ID is "" to plant nothing.
"""

from __future__ import annotations

import runpy
import sys

from narrowfuzz.machine.device import begin
from narrowfuzz.plants.registry import planted


def main(device: str, file: str, id: str, script: str) -> None:
    """Plant, then run the script as __main__. The process exits with the script's exit code."""
    begin(device)
    with planted(file, id):
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
