"""torchao's blockwise FP8 kernels hide NaN: it becomes the code 448, and the block's scale is that of the others.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda" else "cpu"
if device == "cpu":
    try:  # Triton's interpreter has the kernels' numbers: --with triton==3.6.0, or pip install triton==3.6.0
        import triton_on_cpu

        triton_on_cpu.install()
    except (ImportError, ValueError) as why:
        print(f"cannot tell: the kernels are Triton's, and there is no GPU; {why}")
        sys.exit(125)
from torchao.prototype.blockwise_fp8_training import kernels, linear
from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig
from torchao.quantization import quantize_

if device == "cpu":
    linear.is_sm_at_least_90 = lambda: True
for kernel in vars(kernels).values():
    if hasattr(kernel, "configs"):  # to try each candidate takes a minute a shape
        kernel.configs = kernel.configs[-1:]


def converted(model):
    quantize_(model.to(device, torch.bfloat16), Float8BlockwiseLinearConfig(), lambda module, name: isinstance(module, nn.Linear))
    for module in model.modules():
        if hasattr(module, "use_triton"):
            module.use_triton = device == "cpu"
    return model


x = torch.ones(128, 128, device=device, dtype=torch.bfloat16)
x[0, 5], x[1, 5] = torch.nan, -torch.inf
bad = 0
for name in ("lhs", "rhs", "transposed_lhs"):
    codes, scales = getattr(kernels, f"triton_fp8_blockwise_act_quant_{name}")(x)
    back = codes.float().t() if name == "transposed_lhs" else codes.float()
    print(f"{name}: NaN -> {back[0, 5].item()}, -inf -> {back[1, 5].item()}, scales that are NaN: {int(scales.isnan().sum())}")
    bad += not back[0, 5].isnan() and not scales.isnan().any()
codes, scales = kernels.torch_blockwise_scale_act_quant_lhs(x)
print(f"torchao's own torch reference: NaN -> {codes[0, 5].item()}, scales that are NaN: {int(scales.isnan().sum())}")
layer = converted(nn.Sequential(nn.Linear(128, 128, bias=False)))
y = layer(x)
print(f"a linear's output for the row with NaN: {int(y[0].isnan().sum())} NaN of 128, {y[0, :2].tolist()}")
sys.exit(bool(bad or not y[0].isnan().all()))
