"""torchao, triton_fp8_per_group_colwise_scales: of a group larger than the average some rows are not written.
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

x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
bad = 0
for ends in ((256, 512), (112, 512)):
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    codes, _ = utils.torch_to_float8_per_group_colwise(x, offs, torch.float8_e4m3fn, True)
    try:
        found, _ = kernels.triton_fp8_per_group_colwise_scales(x, offs, torch.float8_e4m3fn, True)
    except wrong as error:
        print(f"cannot tell: the interpreter stops it: {error}")
        sys.exit(125)
    rows = (found.float() != codes.float()).any(1)
    print(f"groups up to {ends}: {int(rows.sum())} of 512 rows are not those of torchao's own torch reference")
    bad += int(rows.sum())
sys.exit(bool(bad))
