"""MX weight wrapper: weight @ x, as Mamba multiplies, dies on an assertion that names no rule.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

torch.set_num_threads(1)
torch.manual_seed(0)


class Steps(nn.Module):
    """The time steps of a state space, as Mamba computes them."""

    def __init__(self):
        super().__init__()
        self.dt_proj = nn.Linear(32, 64, dtype=torch.bfloat16)

    def forward(self, x, first):
        if first:
            y = self.dt_proj.weight @ x.transpose(1, 2)
        else:
            y = nn.functional.linear(x, self.dt_proj.weight).transpose(1, 2)
        return y + self.dt_proj.bias[:, None]


bad = 0
for wrapped in (False, True):
    for first in (False, True):
        model = Steps()
        if wrapped:
            quantize_(model, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED))
        product = "weight @ x" if first else "F.linear(x, weight)"
        try:
            model(torch.randn(2, 32, 32, dtype=torch.bfloat16), first).sum().backward()
            print(f"wrapped {wrapped}, {product}: ok")
        except AssertionError as error:
            print(f"wrapped {wrapped}, {product}: AssertionError: {error}")
            bad += wrapped and first
sys.exit(bool(bad))
