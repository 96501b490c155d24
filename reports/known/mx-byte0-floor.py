"""MX FLOOR: a block whose scale byte is 0 (amax < 2^-118) comes back exactly halved.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference


def mx(lin, mode):
    new = MXFP8Linear(lin.in_features, lin.out_features, bias=lin.bias is not None,
                      dtype=lin.weight.dtype, scale_calculation_mode=mode,
                      kernel_preference=KernelPreference.EMULATED)
    new.weight, new.bias = lin.weight, lin.bias
    return new


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for dt in (torch.float32, torch.bfloat16):
    for e in (-117, -118, -119, -121):                # block amax = 1.5 * 2^e; byte = max(e - 8 + 127, 0)
        lin = nn.Linear(32, 32, bias=False, dtype=dt)
        with torch.no_grad():
            lin.weight.copy_(torch.eye(32) * 2.0 ** 40)  # keeps the output far from subnormals
        x = torch.full((1, 32), 1.5 * 2.0 ** e, dtype=dt)
        got = mx(lin, Mode.FLOOR)(x)[0, 0].item()
        want = 1.5 * 2.0 ** (e + 40)                  # 1.5 is on the E4M3 grid: no rounding at all
        print(f"{dt} amax 1.5*2^{e}: got {got:.6g}, rule {want:.6g}, ratio {got / want}")
        bad += got != want
sys.exit(bool(bad))
