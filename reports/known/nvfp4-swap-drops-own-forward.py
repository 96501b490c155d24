"""quantize_ with NVFP4TrainingConfig replaces a subclass of nn.Linear by a plain NVFP4 linear: its forward, parameters and children are gone.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
try:  # Triton's interpreter runs the kernels: --with triton==3.6.0, or pip install triton==3.6.0
    import triton_on_cpu

    triton_on_cpu.install_torchao()
except (ImportError, ValueError) as why:
    print(f"cannot tell: the kernels are Triton's; {why}")
    sys.exit(125)
from torch.nn import functional
from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig
from torchao.quantization import quantize_
from triton_on_cpu.products import nvfp4_scaled_mm

functional.scaled_mm = nvfp4_scaled_mm  # a CPU has no kernel for it


def converted(model):
    quantize_(model.bfloat16(), NVFP4TrainingConfig(rht_sign_vector=(1,) * 16), lambda module, name: isinstance(module, nn.Linear))
    return model


class LoraLinear(nn.Linear):
    def __init__(self, size, rank=4):
        super().__init__(size, size, bias=False)
        self.up = nn.Parameter(torch.randn(size, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.up @ self.up.t()


torch.manual_seed(0)
model, x = nn.Sequential(LoraLinear(128)).bfloat16(), torch.randn(128, 128).bfloat16()
want, names = model(x), set(dict(model.named_parameters()))
converted(model)
got, left = model(x), set(dict(model.named_parameters()))
error = ((got - want).norm() / want.norm()).item()
print(f"{type(model[0]).__name__}: output differs by {error:.0%} (NVFP4 alone: below 20%); parameters gone: {sorted(names - left)}")
sys.exit(1 if error > 0.3 or names != left else 0)
