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
    # as triton_to_mxfp8_dim1 launches it, with room behind the scales
    codes = torch.empty(columns, rows, dtype=torch.float8_e4m3fn)
    room = torch.full((columns * rows // 32 + 4096,), 99, dtype=torch.uint8)
    tile = config.kwargs["ROW_TILE_SIZE"], config.kwargs["COL_TILE_SIZE"]
    grid = -(-rows // tile[0]), -(-columns // tile[1])
    kernels.to_mxfp8_dim1_kernel[grid](x, codes, room, rows, columns, INNER_BLOCK_SIZE=32, SCALING_MODE="rceil")
    scales, behind = room[: columns * rows // 32].view(columns, rows // 32), room[columns * rows // 32 :]
    wrong = int((scales != reference.view(torch.uint8)).sum())
    outside = int((behind != 99).sum())
    print(f"tiles of {tile[0]} x {tile[1]}: {wrong} of {scales.numel()} scales are wrong, {outside} bytes are written outside")
    bad += wrong + outside
sys.exit(bool(bad))
