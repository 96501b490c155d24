"""torchao MXFP8: the Triton casts multiply a block whose scale byte is 0 by 1, not by 2^127: it becomes 0.
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

bad = 0
kernels.to_mxfp8_dim1_kernel.configs = kernels.to_mxfp8_dim1_kernel.configs[:1]  # tiles of 128 x 128
for mode in ("floor", "rceil"):
    for amax in (2.0**-112, 2.0**-119, 2.0**-124):
        x = torch.full((128, 128), amax, dtype=torch.bfloat16)
        for name in ("dim0", "dim1"):
            codes, scale = getattr(kernels, f"triton_to_mxfp8_{name}")(x, scaling_mode=mode)
            back = codes[0, 0].double() * 2.0 ** (int(scale.view(torch.uint8)[0, 0]) - 127)
            print(f"{mode}, {name}: {amax:.3g} -> byte {int(scale.view(torch.uint8)[0, 0])}, stands for {back.item():.3g}")
            bad += back.item() != amax  # a power of two: nothing is rounded
sys.exit(bool(bad))
