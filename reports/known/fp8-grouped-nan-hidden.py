"""torchao's FP8 products of groups hide NaN: in an expert's gradient it becomes a finite number.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda" else "cpu"
if device == "cpu":
    try:  # Triton's interpreter has the kernels' numbers: --with triton==3.6.0, or pip install triton==3.6.0
        import triton_on_cpu

        triton_on_cpu.install_torchao()
    except (ImportError, ValueError) as why:
        print(f"cannot tell: the kernels are Triton's, and there is no GPU; {why}")
        sys.exit(125)
from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm
from torchao.prototype.moe_training.utils import torch_to_float8_per_group_colwise

torch.manual_seed(0)
x, w, grad = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((32, 32), (2, 32, 32), (32, 32)))
x[3, 5] = torch.nan
offs = torch.tensor([16, 32], dtype=torch.int32, device=device)
x, w = x.requires_grad_(), w.requires_grad_()
y = _to_fp8_rowwise_then_scaled_grouped_mm(x, w.transpose(1, 2), offs, pad_token_groups_for_grouped_mm=False)
y.backward(grad)
codes = torch_to_float8_per_group_colwise(x.detach(), offs, torch.float8_e4m3fn, True)[0]
print("x[3, 5] is NaN, in the first group of two")
print(f"torchao's own torch reference of the cast: code {codes[3, 5].item()}")
print(f"output of row 3: {int(y[3].isnan().sum())} of 32 are NaN, {y[3, :2].tolist()}")
print(f"weight gradient of the first expert, column 5: {int(w.grad[0, :, 5].isnan().sum())} of 32 are NaN, {w.grad[0, :2, 5].tolist()}")
sys.exit(bool(y[3].isfinite().all() and w.grad[0, :, 5].isfinite().all()))
