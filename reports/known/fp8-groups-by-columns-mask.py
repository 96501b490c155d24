"""torchao, triton_fp8_per_group_colwise_scales: scales are written behind those of their group, and behind the tensor.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda" else "cpu"
wrong = ()
if device == "cpu":
    try:  # Triton's interpreter has the kernels' numbers: --with triton==3.6.0, or pip install triton==3.6.0
        import triton_on_cpu

        triton_on_cpu.install_torchao()
    except (ImportError, ValueError) as why:
        print(f"cannot tell: the kernels are Triton's, and there is no GPU; {why}")
        sys.exit(125)
    wrong = (triton_on_cpu.OutsideError, triton_on_cpu.WrittenTwiceError)
from torchao.prototype.moe_training.kernels import jagged_float8_scales as kernels
from torchao.prototype.moe_training import utils

rows, features = 64, 144
x = torch.randn(rows, features, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
offs = torch.tensor([32, 64], dtype=torch.int32, device=device)
every, bad = kernels._triton_fp8_per_group_colwise_scales_kernel.configs, 0
for block in (32, 64, 128):
    chosen = [config for config in every if config.kwargs["BLOCK_SIZE"] == block][:1]
    kernels._triton_fp8_per_group_colwise_scales_kernel.configs = chosen
    memory = torch.full((4096 + 2 * features + 4096,), -1.0, device=device)
    empty = torch.empty

    class Guarded:  # the one tensor of scales lies within more memory
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *size, **how):
            return memory[4096 : 4096 + 2 * features]

    usual, kernels.torch = kernels.torch, Guarded()
    try:
        kernels.triton_fp8_per_group_colwise_scales(x, offs, torch.float8_e4m3fn, True)
        outside = 4 * int((memory[:4096] != -1).sum() + (memory[4096 + 2 * features :] != -1).sum())
        print(f"{features} columns, blocks of {block}: {outside} bytes are written outside of the scales")
        bad += outside
    except wrong as error:
        print(f"{features} columns, blocks of {block}: the interpreter stops it: {error}")
        bad += 1
    finally:
        kernels.torch = usual
sys.exit(bool(bad))
