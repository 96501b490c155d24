"""Run a script with a fault or a control planted.

python -m harness.faults.run_script FILE ID PATH; a control's ID is ``control:<id>``.
"""

from __future__ import annotations

import runpy
import sys

from harness.faults.registry import planted


def main(file: str, name: str, script: str) -> None:
    """Plant, then run the script as __main__; its exit code is ours."""
    with planted(file, name):
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
