"""Float8BlockwiseLinear refuses sizes that are no multiple of 128 without saying so, tokens only in backward or in cuBLAS's words.
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


bad = 0
for sizes in ((64, 128), (128, 64)):
    try:
        converted(nn.Sequential(nn.Linear(*sizes, bias=False)))
        print(f"{sizes[0]} to {sizes[1]} features: converted")
    except AssertionError as error:
        print(f"{sizes[0]} to {sizes[1]} features: refused with the words {str(error)!r}")
        bad += "128" not in str(error)
for triton, tokens in ((False, 1), (False, 4), (True, 4)) if device == "cuda" else ((True, 4),):
    model = converted(nn.Sequential(nn.Linear(128, 128, bias=False)))
    model[0].use_triton, ran = triton, ""
    try:
        y = model(torch.randn(tokens, 128, device=device, dtype=torch.bfloat16, requires_grad=True))
        ran = "forward, and then "
        y.sum().backward()
        print(f"{tokens} tokens, use_triton={triton}: runs")
    except (AssertionError, RuntimeError) as error:
        print(f"{tokens} tokens, use_triton={triton}: runs {ran}{type(error).__name__}: {str(error)[:90]}")
        bad += bool(ran) or "128" not in str(error)
sys.exit(bool(bad))
