"""quantize_(MXFP8TrainingOpConfig): the parameters of modules inside a converted linear are swapped too, unasked.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
torch.set_num_threads(1)


class NormedLinear(nn.Linear):
    def __init__(self):
        super().__init__(32, 32, bias=False)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return super().forward(self.norm(x))


model = nn.Sequential(NormedLinear(), nn.LayerNorm(32))
quantize_(model, config)  # the default filter: linears only
kinds = {name: type(p).__name__ for name, p in model.named_parameters()}
for name, kind in kinds.items():
    print(f"{name}: {kind}")
sys.exit(1 if "Wrapper" in kinds["0.norm.weight"] else 0)
