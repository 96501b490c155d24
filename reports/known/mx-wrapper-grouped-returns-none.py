"""quantize_ with MXFP8TrainingOpConfig or Float8TrainingOpConfig: grouped_mm of such a weight returns None where offsets are no keyword, or there are none.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

torch.set_num_threads(1)
torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 64, 32, dtype=torch.bfloat16))


offs, bad = torch.tensor([32, 96], dtype=torch.int32), 0
rows, batches = torch.randn(96, 32).bfloat16(), torch.randn(2, 32, 32).bfloat16()
for config in (None, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED), Float8TrainingOpConfig()):
    model = nn.ModuleDict({"experts": Experts()})
    if config is not None:
        quantize_(model, config, lambda module, name: name == "experts")
    w = model["experts"].w.transpose(-2, -1)
    name = "not converted" if config is None else type(config).__name__
    for title, call in (
        ("_grouped_mm(rows, w, offs)", lambda: torch._grouped_mm(rows, w, offs)),
        ("_grouped_mm(batches, w)", lambda: torch._grouped_mm(batches, w)),
    ):
        result = call()
        bad += result is None
        print(f"{name}: torch.{title} is {None if result is None else tuple(result.shape)}")
sys.exit(bool(bad))
