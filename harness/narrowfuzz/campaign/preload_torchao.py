"""Imported once by the fork server of workers that run on the CPU, so that they start with torchao.

Importing torchao queries the GPU, which initialises CUDA, and a process that is forked after that
cannot use CUDA: where workers run on GPUs, each of them imports torchao by itself.
"""

from __future__ import annotations

import contextlib

from narrowfuzz.machine.environment import importing
from narrowfuzz.play.own import interpreted

interpreted()  # torchao's kernels are defined when it is imported
# a recipe that needs a missing module reports that when it is used
with importing(), contextlib.suppress(ImportError):
    import torchao.float8
    import torchao.prototype.moe_training.config
    import torchao.prototype.moe_training.mxfp8_linear
    import torchao.quantization  # noqa: F401
