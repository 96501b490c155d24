"""Imported once by the fork server, so that every worker starts with torch loaded."""

from __future__ import annotations

import atexit
import gc

from narrowfuzz.machine.environment import importing, quieten

with importing():
    import torch._dynamo  # noqa: F401

quieten()
atexit.register(gc.freeze)  # else a process that ends looks through all that torch has made
