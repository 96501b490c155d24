"""Imported once by the fork server of workers that run on the CPU, so that they start with torchao.

Importing torchao asks for the GPU, which starts CUDA, and no process that was forked after that can
use it: where workers run on GPUs, each imports it for itself.
"""

from __future__ import annotations

import contextlib
import os

if os.environ.get("TRITON_INTERPRET") == "1":  # its Triton kernels are defined when it is imported
    import triton_on_cpu

    triton_on_cpu.install_torchao()

with contextlib.suppress(ImportError):  # a recipe that needs it says so when it is used
    import torchao.float8
    import torchao.prototype.moe_training.config
    import torchao.prototype.moe_training.mxfp8_linear
    import torchao.quantization  # noqa: F401
