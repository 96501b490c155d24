"""quantize_ with Float8BlockwiseLinearConfig replaces a subclass of nn.Linear by a plain blockwise linear: its forward, parameters and children are gone.
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


class LoraLinear(nn.Linear):
    def __init__(self, size, rank=4):
        super().__init__(size, size, bias=False)
        self.up = nn.Parameter(torch.randn(size, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.up @ self.up.t()


torch.manual_seed(0)
model, x = nn.Sequential(LoraLinear(128)).to(device, torch.bfloat16), torch.randn(128, 128).to(device, torch.bfloat16)
want, names = model(x), set(dict(model.named_parameters()))
converted(model)
got, left = model(x), set(dict(model.named_parameters()))
error = ((got - want).norm() / want.norm()).item()
print(f"{type(model[0]).__name__}: output differs by {error:.0%} (FP8 alone: below 10%); parameters gone: {sorted(names - left)}")
sys.exit(1 if error > 0.2 or names != left else 0)
