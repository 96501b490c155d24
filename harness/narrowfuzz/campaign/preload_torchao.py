"""Imported once by the fork server of workers that run on the CPU, so that they start with torchao.

Importing torchao asks for the GPU, which starts CUDA, and no process that was forked after that can
use it: where workers run on GPUs, each imports it for itself.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # a recipe that needs it says so when it is used
    import torchao.float8
    import torchao.prototype.moe_training.config
    import torchao.prototype.moe_training.mxfp8_linear
    import torchao.quantization  # noqa: F401
