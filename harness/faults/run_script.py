"""Run a script with a fault planted: python -m harness.faults.run_script FILE ID PATH."""

from __future__ import annotations

import runpy
import sys

from harness.faults.registry import find_fault


def main(file: str, fault_id: str, script: str) -> None:
    """Plant, then run the script as __main__; its exit code is ours."""
    with find_fault(file, fault_id).plant():
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
