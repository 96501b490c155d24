"""torchao's Triton kernels, defined without a GPU and made ready to run in the interpreter."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Any
from unittest.mock import patch

import triton_on_cpu.memory as memory
from triton_on_cpu.install import install
from triton_on_cpu.products import scaled_grouped_mm

_MX = "torchao.prototype.mx_formats.kernels"
_MOE = "torchao.prototype.moe_training"
_FP4 = f"{_MOE}.nvfp4_training"
#: The first supported release of torchao.
_KNOWN = (0, 18)
#: The modules whose functions launch kernels.
_LAUNCHING = (
    _MX,
    f"{_FP4}.quantize_2d_triton",
    f"{_FP4}.hadamard_amax_triton",
    f"{_FP4}.hadamard_quantize_row_col_triton",
    f"{_MOE}.kernels.float8_rowwise",
    f"{_MOE}.kernels.jagged_float8_scales",
    f"{_MOE}.kernels.mxfp8.quant",
    "torchao.prototype.blockwise_fp8_training.kernels",
)


def install_torchao() -> None:
    """Call ``install()``, then import torchao's kernels as on a Blackwell GPU.

    torchao queries the GPU when it is imported, so call this before any import of torchao. Raises
    ValueError if its MX kernels were already imported without this, and, before anything is
    patched, for an unsupported release of torchao. A second call does nothing.
    """
    release = importlib.metadata.version("torchao")
    if tuple(map(int, release.split(".")[:2])) < _KNOWN:
        raise ValueError(f"torchao's kernels are known from 0.18 on; {release} is installed")
    install()
    kernels: Any = sys.modules.get(_MX)
    if kernels is None:
        import torchao.utils as asked

        # the kernels of MX casts are defined for an MI350, or for CUDA 12.8 on Blackwell; inside
        # them IS_ROCM selects the path, here that of Blackwell
        with (
            patch.object(asked, "is_ROCM", lambda: True),
            patch.object(asked, "is_MI350", lambda: True),
            patch.object(asked, "is_sm_at_least_100", lambda: False),
        ):
            kernels = importlib.import_module(_MX)
        if hasattr(kernels, "IS_ROCM"):
            import triton.language as tl

            kernels.IS_ROCM = tl.constexpr(False)
    if not hasattr(kernels, "to_mxfp8_dim0_kernel"):
        raise ValueError(
            "torchao was imported before its kernels could be made to run here; call "
            "triton_on_cpu.install_torchao() first"
        )
    for name in _LAUNCHING:
        module: Any = importlib.import_module(name)
        memory.use_poisoned_torch(module)
        if hasattr(module, "is_sm_at_least_100"):
            module.is_sm_at_least_100 = lambda: True
    rowwise = importlib.import_module(f"{_MOE}.fp8_grouped_mm")
    memory.use_poisoned_torch(rowwise, _scaled_grouped_mm=scaled_grouped_mm)
