"""torchao MXFP8, AUTO: what the Triton casts do not take is refused by an assertion that names no layer, or only in backward.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
try:  # Triton's interpreter runs the kernels: --with triton==3.6.0, or pip install triton==3.6.0
    import triton_on_cpu

    triton_on_cpu.install_torchao()
except (ImportError, ValueError) as why:
    print(f"cannot tell: the kernels are Triton's; {why}")
    sys.exit(125)
from types import SimpleNamespace

from torchao.prototype.moe_training import mxfp8_linear
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats import kernels, mx_tensor
from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Choice
from triton_on_cpu.memory import use_poisoned_torch
from triton_on_cpu.products import mx_scaled_mm

# the linear's casts along dim 1 by the library's Triton kernel, and its product emulated
mxfp8_linear.MXFP8Dim1CastKernelChoice = SimpleNamespace(CUDA=Choice.TRITON, TORCH=Choice.TORCH)
use_poisoned_torch(mx_tensor, _scaled_mm=mx_scaled_mm)
kernels.to_mxfp8_dim1_kernel.configs = kernels.to_mxfp8_dim1_kernel.configs[:1]  # tiles of 128 x 128
bad = 0
for rows, size, dtype, how in (
    (128, 128, torch.bfloat16, "contiguous"), (128, 128, torch.bfloat16, "transposed"), (128, 128, torch.float32, "contiguous"),
    (128, 40, torch.bfloat16, "contiguous"), (96, 96, torch.bfloat16, "contiguous"),
):
    model = nn.Sequential(MXFP8Linear(size, size, bias=False, dtype=dtype))
    x = torch.randn(size, rows, dtype=dtype).t() if how == "transposed" else torch.randn(rows, size, dtype=dtype)
    what, phase = f"{rows} tokens, {size} x {size}, {dtype}, {how}", "forward"
    try:
        y = model(x)
        phase = "backward"
        y.sum().backward()
    except AssertionError as error:
        print(f"{what}: {phase} raises AssertionError: {error}")
        bad += 1
    else:
        print(f"{what}: runs")
sys.exit(bool(bad))
