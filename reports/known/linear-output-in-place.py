"""float8 and MX linears without a bias: what writes in place into their output raises, as nn.ReLU(inplace=True) does.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import dataclasses
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
try:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
except ImportError:  # before torchao 0.18
    MXFP8Linear = None

torch.set_num_threads(1)
torch.manual_seed(0)


def float8(linear, recipe):
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(nn.Sequential(linear), config=config)[0]


def mx(linear):
    new = MXFP8Linear(linear.in_features, linear.out_features, bias=linear.bias is not None,
                      dtype=linear.weight.dtype, kernel_preference=KernelPreference.EMULATED)
    new.weight, new.bias = linear.weight, linear.bias
    return new


LAYERS = {
    "nn.Linear": lambda linear: linear,
    "float8, tensorwise": lambda linear: float8(linear, "tensorwise"),
    "float8, rowwise": lambda linear: float8(linear, "rowwise"),
    **({} if MXFP8Linear is None else {"MXFP8Linear": mx}),
}
WRITES = {
    "nn.ReLU(inplace=True)": nn.ReLU(inplace=True),
    "y += 1": lambda y: y.add_(1),
    "a copy first": lambda y: torch.relu_(y.clone()),
}
bad = 0
for layer, convert in LAYERS.items():
    for bias in (False, True):
        for name, write in WRITES.items():
            linear = convert(nn.Linear(64, 32, bias=bias, dtype=torch.bfloat16))
            x = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
            try:
                write(linear(x)).sum().backward()
                print(f"{layer}, bias {bias}, {name}: ok")
            except RuntimeError as error:
                print(f"{layer}, bias {bias}, {name}: {' '.join(str(error).split())[:110]}")
                bad += "is a view and is being modified inplace" in str(error)
sys.exit(bool(bad))
