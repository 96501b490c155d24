"""MX layers until torchao 0.13, fp32 under CPU autocast: forward multiplies in bf16, backward multiplies bf16 by fp32.

0.14 and later leave forward in fp32 (mx-ignores-autocast) and backward runs. A plain linear runs everywhere.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn


def mx(linear):
    """The layer of this release, emulated."""
    try:
        from torchao.prototype.mx_formats.config import MXLinearConfig
        from torchao.prototype.mx_formats.mx_linear import MXLinear
        return MXLinear.from_float(linear, config=MXLinearConfig(block_size=32))
    except ImportError:  # since 0.17 a wrapped weight
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
        from torchao.quantization import quantize_
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    model = nn.Sequential(linear)
    quantize_(model, config=MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED),
              filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for name, made in (("nn.Linear", lambda linear: linear), ("MX", mx)):
    for bias in (False, True):
        layer = made(nn.Linear(64, 32, bias=bias))
        x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 32)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        try:
            y.backward(g.to(y.dtype))
            said = f"backward runs, gradient of the input {x.grad.dtype}"
        except RuntimeError as error:
            if "to have the same dtype" not in str(error):
                raise
            said, bad = f"backward raises: {error}", bad + 1
        print(f"{name}, bias={bias}: output {y.dtype}, {said}")
sys.exit(bool(bad))
