"""torchao MXFP8, floor: the Triton casts keep a NaN in its code, and to_mx in the scale of its block.
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
from torchao.prototype.mx_formats import kernels
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.prototype.mx_formats.mx_tensor import to_mx

x = torch.ones(128, 128, dtype=torch.bfloat16)
x[0, 5] = torch.nan
bad = 0
for name, mode in (("floor", Mode.FLOOR), ("rceil", Mode.RCEIL)):
    scale, codes = to_mx(x, torch.float8_e4m3fn, 32, mode)
    ours = {"to_mx": (codes, scale)}
    ours["triton_to_mxfp8_dim0"] = kernels.triton_to_mxfp8_dim0(x, scaling_mode=name)
    kernels.to_mxfp8_dim1_kernel.configs = kernels.to_mxfp8_dim1_kernel.configs[:1]  # tiles of 128 x 128
    codes, scale = kernels.triton_to_mxfp8_dim1(x.t().contiguous(), scaling_mode=name)
    ours["triton_to_mxfp8_dim1"] = codes.t(), scale
    for function, (codes, scale) in ours.items():
        block = codes[0, :32].float() * scale[0, 0].float()
        finite = int(block.isfinite().sum())
        print(f"{name}, {function}: scale {scale[0, 0].item()}, {finite} of 32 numbers of the block with NaN are finite; x[0, 5] -> {block[5].item()}")
        bad += bool(finite)
sys.exit(bool(bad))
