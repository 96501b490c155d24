"""quantize_ with MXFP8TrainingOpConfig: experts whose weight is transposed die under torch.inference_mode.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

torch.set_num_threads(1)
torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 64, 32, dtype=torch.bfloat16))

    def forward(self, x, offs):
        return torch._grouped_mm(x, self.w.transpose(-2, -1), offs=offs)


model = nn.ModuleDict({"experts": Experts()})
quantize_(model, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED), lambda module, name: name == "experts")
x, offs, bad = torch.randn(96, 32).bfloat16(), torch.tensor([32, 96], dtype=torch.int32), 0
for mode in (torch.no_grad, torch.inference_mode):
    with mode():
        try:
            print(f"{mode.__name__}: runs, output {tuple(model['experts'](x, offs).shape)}")
        except RuntimeError as error:
            bad += mode is torch.inference_mode and "version_counter" in str(error)
            print(f"{mode.__name__}: raises {error}")
sys.exit(bool(bad))
