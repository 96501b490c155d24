"""Float8BlockwiseLinear refuses an input that is not contiguous.
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


model, bad = converted(nn.Sequential(nn.Linear(128, 128, bias=False))), 0
x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
for words, given in (("contiguous", x[:, :128].contiguous()), ("every second row", x.view(128, 2, 128)[:, 0]), ("transposed", x[:, :128].t())):
    try:
        model(given)
        print(f"{words}: runs")
    except AssertionError as error:
        print(f"{words}: {error}")
        bad += 1
sys.exit(bool(bad))
