"""MX: grad(create_graph=True) returns a gradient without a graph, so a gradient penalty is silently ignored.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
try:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
except ImportError:  # torchao 0.13 to 0.16: MXLinear, emulated unless told otherwise
    from torchao.prototype.mx_formats.config import MXLinearConfig
    from torchao.prototype.mx_formats.mx_linear import MXLinear
    MXFP8Linear = None


def mx(lin, mode):
    made = dict(in_features=lin.in_features, out_features=lin.out_features,
                bias=lin.bias is not None, dtype=lin.weight.dtype)
    if MXFP8Linear is None:
        new = MXLinear.from_float(nn.Linear(**made), config=MXLinearConfig(scale_calculation_mode=mode))
    else:
        new = MXFP8Linear(**made, scale_calculation_mode=mode, kernel_preference=KernelPreference.EMULATED)
    new.weight, new.bias = lin.weight, lin.bias
    return new


torch.set_num_threads(1)
torch.manual_seed(0)
lin = nn.Linear(64, 32, bias=False)
x = torch.randn(32, 64, requires_grad=True)
res = {}
for name, m in (("nn.Linear", lin), ("MX", mx(lin, Mode.RCEIL))):
    m.zero_grad(set_to_none=True)
    y = m(x)
    g, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (y.sum() + 1000.0 * g.square().sum()).backward()   # the second term dominates by far
    res[name] = m.weight.grad.norm().item()
    print(f"{name}: gradient has graph {g.requires_grad}, |weight.grad| {res[name]:.4g}")
print("float8 recipes refuse: AssertionError 'Expecting  both Float8TrainingTensor for mm inputs'")
sys.exit(res["MX"] < 0.5 * res["nn.Linear"])
