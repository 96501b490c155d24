"""Autocast under torch.inference_mode: float8 tensorwise and MXFP8 layers die in forward; under no_grad they run."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training, Float8LinearConfig
try:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
except ImportError:  # before torchao 0.18
    MXFP8Linear = None

torch.set_num_threads(1)
torch.manual_seed(0)
config = Float8LinearConfig(emulate=True)
layers = {
    "float8 tensorwise": convert_to_float8_training(nn.Sequential(nn.Linear(64, 32)), config=config),
}
if MXFP8Linear is not None:
    layers["MXFP8"] = MXFP8Linear(64, 32, kernel_preference=KernelPreference.EMULATED)
bad = 0
for name, layer in layers.items():
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast("cpu", torch.bfloat16):
            try:
                said = f"returns {layer(torch.randn(32, 64)).dtype}"
            except NotImplementedError as error:
                said, bad = f"raises {str(error)[:120]}", bad + (mode is torch.inference_mode)
        print(f"{name} under autocast and {mode.__name__}: {said}")
sys.exit(bool(bad))
