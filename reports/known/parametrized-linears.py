"""weight_norm and other parametrized linears: float8 conversion dies without naming the layer, MXFP8 in the first forward.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
torch.set_num_threads(1)
bad = 0
by_hooks = (nn.utils.weight_norm, nn.utils.spectral_norm)
for norm in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, *by_hooks):
    for convert in (convert_to_float8_training, lambda m: quantize_(m, config) or m):
        model, phase = nn.Sequential(), "convert"
        model.add_module("proj", norm(nn.Linear(32, 32)))
        try:
            model = convert(model)
            phase = "forward"
            model(torch.randn(32, 32))
            print(norm.__name__, "runs")
        except Exception as error:
            print(f"{norm.__name__}: {phase} raises {type(error).__name__}: {error}")
            bad += phase != "convert" or "proj" not in str(error)
    linear, x = norm(nn.Linear(32, 32, bias=False)).eval(), torch.randn(32, 32)
    plain = linear(x)
    quantize_(nn.Sequential(linear), config)
    if torch.equal(linear(x), plain):
        print(f"{norm.__name__} without a bias: nothing is quantised")
        bad += 1
sys.exit(1 if bad else 0)
