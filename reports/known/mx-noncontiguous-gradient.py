"""MX layers until torchao 0.16: backward refuses a gradient that is not contiguous with one word.

A plain linear takes all of them, as autograd may hand on any layout: sum() gives an expanded gradient.
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
gradients = {
    "contiguous": torch.randn(32, 32),
    "expanded, as of sum()": torch.ones(1, 1).expand(32, 32),
    "transposed": torch.randn(32, 32).t(),
}
bad = 0
for name, made in (("nn.Linear", lambda linear: linear), ("MX", mx)):
    for layout, gradient in gradients.items():
        layer, x = made(nn.Linear(32, 32, bias=False)), torch.randn(32, 32, requires_grad=True)
        try:
            layer(x).backward(gradient)
            said = "backward runs"
        except AssertionError as error:
            if str(error) != "unsupported" or layout == "contiguous":
                raise
            said, bad = f"backward raises AssertionError: {error}", bad + 1
        print(f"{name}, gradient {layout}: {said}")
sys.exit(bool(bad))
