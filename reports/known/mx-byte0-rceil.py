"""MX RCEIL: a block whose scale byte is 0 (amax <= 448*2^-127 = 2.63e-36) comes back as zero.
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
bad = 0
for dt in (torch.float32, torch.bfloat16):
    for amax in (2.0 ** -117, 448 * 2.0 ** -127, 2.0 ** -119, 2.0 ** -122):
        lin = nn.Linear(32, 32, bias=False, dtype=dt)
        with torch.no_grad():
            lin.weight.copy_(torch.eye(32) * 2.0 ** 40)
        x = torch.full((1, 32), amax, dtype=dt)
        got = mx(lin, Mode.RCEIL)(x)[0, 0].item()
        want = amax * 2.0 ** 40                       # on the E4M3 grid of its block: no rounding
        print(f"{dt} amax {amax:.6g}: got {got:.6g}, rule {want:.6g}")
        bad += got != want
sys.exit(bool(bad))
