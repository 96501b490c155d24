"""Run scripts one by one, each in a child of this process, and print each one's exit code.

    python run_forked.py LIBRARY SCRIPT...

Importing TransformerEngine, or what makes torchao's Triton kernels run on a CPU, takes seconds, so
it happens once: a child starts with the library as it is after its import.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback


def _transformer_engine() -> None:
    from te_on_cpu.environment import enter

    enter()
    import transformer_engine.pytorch  # noqa: F401


def _triton() -> None:
    import triton_on_cpu

    triton_on_cpu.install_torchao()


LIBRARIES = {"transformer_engine": _transformer_engine, "triton": _triton}


def main(library: str, *scripts: str) -> None:
    LIBRARIES[library]()
    for script in scripts:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os._exit(_run(script))
        _, status = os.waitpid(child, 0)
        print(f"{script} {os.waitstatus_to_exitcode(status)}", flush=True)


def _run(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        sys.stdout.flush()
        return int(ended.code or 0)
    except Exception:
        traceback.print_exc()
        return 3
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
