"""Imported once by the fork server of workers that run on the CPU, so that they start with torchao.

Importing torchao asks for the GPU, which starts CUDA, and no process that was forked after that can
use it: where workers run on GPUs, each imports it for itself.
"""

from __future__ import annotations

import contextlib

from narrowfuzz.play.own import interpreted

interpreted()  # torchao's kernels are defined when it is imported
# a recipe that needs what cannot be imported says so when it is used
with contextlib.suppress(ImportError):
    import torchao.float8
    import torchao.prototype.moe_training.config
    import torchao.prototype.moe_training.mxfp8_linear
    import torchao.quantization  # noqa: F401
