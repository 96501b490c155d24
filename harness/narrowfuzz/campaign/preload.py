"""Imported once by the fork server, so that every worker starts with torch and torchao loaded."""

from __future__ import annotations

import contextlib

import torch
import torch._dynamo  # noqa: F401

from narrowfuzz.environment import quieten

quieten()
with contextlib.suppress(ImportError):  # a recipe that needs it says so when it is used
    import torchao.float8
    import torchao.prototype.moe_training.config
    import torchao.prototype.moe_training.mxfp8_linear
    import torchao.quantization  # noqa: F401
