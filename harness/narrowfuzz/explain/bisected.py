"""Run as a script: applies PyTorch's CompilerBisector to the script that $SCRIPT names.

That script exits with 1 if its divergence shows, and with 0 if it does not. Before each try a JSON
object with the ``backend`` that is tried is printed. The last line is a JSON object, too:
``backend``, ``subsystem`` ("setting" where a changed setting removes it, "" where no part of the
backend makes a difference), the ``number`` of times the subsystem must be applied, and ``what`` it
is applied to then, or the setting.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys

import torch
from torch._inductor import compiler_bisector, config

CANNOT_TELL = 125


def right() -> bool:
    """Does the script not show its divergence, compiled as the bisector has now configured it?"""
    torch._dynamo.reset()
    trying = compiler_bisector.CompilerBisector.get_backend()
    print(json.dumps({"backend": trying}), flush=True)
    hook, code = sys.excepthook, None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        sys.excepthook = hook
    if code not in (0, 1, None):
        sys.exit(CANNOT_TELL)
    return not code


if __name__ == "__main__":
    config.force_disable_caches = True
    # it checks fake tensors against real ones, which FlexAttention does not allow
    compiler_bisector.BACKENDS.pop("aot_eager_decomp_partition_crossref", None)
    found = compiler_bisector.CompilerBisector.do_bisect(right)
    if found is None:
        sys.exit(CANNOT_TELL)
    settings = {
        change.name: f"{change.config_field} = {change.config_value}"
        for changes in compiler_bisector.BACKENDS.values()
        for change in changes
        if isinstance(change, compiler_bisector.ConfigChange)
    }
    part = found.subsystem or ""
    print(
        json.dumps(
            {
                "backend": found.backend,
                "subsystem": "setting" if part in settings else part,
                "number": found.bisect_number or 0,
                "what": settings.get(part, found.debug_info or ""),
            }
        )
    )
