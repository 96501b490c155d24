"""torchao, triton_fp8_per_group_rowwise_scales: codes of one row are written over those of the row before.
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

x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
offs = torch.tensor([32, 64], dtype=torch.int32, device=device)
codes, _ = utils.torch_to_float8_per_group_rowwise(x, offs, torch.float8_e4m3fn, True)
try:
    found, _ = kernels.triton_fp8_per_group_rowwise_scales(x, offs, torch.float8_e4m3fn, True)
except wrong as error:
    print(f"the interpreter stops it: {error}")
    sys.exit(1)
bad = int((found.float() != codes.float()).sum())
print(f"{bad} of {codes.numel()} codes are not those of torchao's own torch reference")
sys.exit(bool(bad))
