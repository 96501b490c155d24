"""torchao, permute_mxfp8_fwd_hp_bwd(use_triton_for_bwd=False): backward raises, for a row too many.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda" else "cpu"
if device == "cpu":
    try:  # the numbers of rows are made by a Triton kernel: --with triton==3.6.0, or pip install triton==3.6.0
        import triton_on_cpu

        triton_on_cpu.install_torchao()
    except (ImportError, ValueError) as why:
        print(f"cannot tell: a kernel is Triton's, and there is no GPU; {why}")
        sys.exit(125)
from torchao.prototype.moe_training.ep.permute import permute_mxfp8_fwd_hp_bwd
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx

counts = torch.tensor([4, 2, 1, 3], dtype=torch.int32, device=device)  # two ranks, two experts


def gradient(triton):
    scales, codes = to_mx(torch.randn(10, 64, dtype=torch.bfloat16, device=device), torch.float8_e4m3fn, 32)
    rows = MXTensor.from_qdata_and_scales(codes, scales, torch.bfloat16).requires_grad_()
    moved = permute_mxfp8_fwd_hp_bwd(rows, counts, 2, 2, 32, use_triton_for_bwd=triton)[1]
    try:
        (grad,) = torch.autograd.grad(moved, rows, torch.ones(moved.shape, dtype=torch.bfloat16, device=device))
        return f"{grad.shape[0]} rows"
    except RuntimeError as error:
        return str(error)


kernel, by_torch = gradient(True), gradient(False)
print("the gradient of 10 rows, by the Triton kernel:", kernel)
print("by torch:", by_torch)
sys.exit(kernel == "10 rows" and "invalid gradient" in by_torch)
