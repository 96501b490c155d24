"""nn.LazyLinear: both conversions accept it without a word, and its first forward fails.
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
for convert in (convert_to_float8_training, lambda m: quantize_(m, config) or m):
    try:
        model = convert(nn.Sequential(nn.LazyLinear(32)))
    except Exception as error:
        print(f"refused at conversion by {type(error).__name__}: {error}")
        continue
    try:
        model(torch.randn(32, 32))
        print(type(model[0]).__name__, "runs")
    except Exception as error:
        bad += 1
        print(f"{type(model[0]).__name__}: accepted, forward raises {type(error).__name__}:", str(error)[:90])
sys.exit(1 if bad else 0)
