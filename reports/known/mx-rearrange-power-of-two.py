"""torchao, triton_mx_block_rearrange_2d_M_groups and _2d_K_groups: three experts are refused.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda" else "cpu"
if device == "cpu":
    try:  # Triton's interpreter refuses what its compiler does: --with triton==3.6.0, or pip install triton==3.6.0
        import triton_on_cpu

        triton_on_cpu.install_torchao()
    except (ImportError, ValueError) as why:
        print(f"cannot tell: the kernels are Triton's, and there is no GPU; {why}")
        sys.exit(125)
from torchao.prototype.moe_training.kernels.mxfp8 import quant

bad = 0
for name, of in (("2d_M_groups", torch.Tensor.contiguous), ("2d_K_groups", torch.Tensor.t)):
    scales = of(torch.randint(0, 255, (384, 128), dtype=torch.uint8, device=device)).contiguous()
    for ends in ((128, 384), (128, 256, 384)):
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        right, _ = getattr(quant, f"torch_to_blocked_{name}")(scales, offs)
        try:
            found = getattr(quant, f"triton_mx_block_rearrange_{name}")(scales, offs)
            print(f"{name}, {len(ends)} experts: as torchao's torch reference:", torch.equal(found.flatten(), right.flatten()))
        except Exception as error:
            refused = "must be a power of 2" in str(error) or "must be a power of 2" in str(error.__cause__)
            print(f"{name}, {len(ends)} experts: {type(error).__name__}, arange's range must be a power of 2:", refused)
            bad += refused
sys.exit(bool(bad))
