"""torchao MXFP8, triton_to_mxfp8_dim1: tiles that do not divide the matrix write scales to wrong places, and outside of the tensor.
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

rows, columns = 384, 256
x = torch.randn(rows, columns, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
reference = kernels.triton_to_mxfp8_dim0(x.t().contiguous())[1]
every, bad = kernels.to_mxfp8_dim1_kernel.configs, 0
for config in every[::4]:  # the others have the same tiles
    kernels.to_mxfp8_dim1_kernel.configs = [config]
    what = f"tiles of {config.kwargs['ROW_TILE_SIZE']} x {config.kwargs['COL_TILE_SIZE']}"
    try:
        scales = kernels.triton_to_mxfp8_dim1(x)[1]
    except (triton_on_cpu.OutsideError, triton_on_cpu.WrittenTwiceError) as error:
        print(f"{what}: {error}")
        bad += 1
    else:
        wrong = int((scales.view(torch.uint8) != reference.view(torch.uint8)).sum())
        print(f"{what}: {wrong} of {scales.numel()} scales are wrong")
        bad += wrong
sys.exit(bool(bad))
