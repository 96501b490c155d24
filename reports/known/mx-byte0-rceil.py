"""MX RCEIL: a block whose scale byte is 0 (amax <= 448*2^-127 = 2.63e-36) comes back as zero.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode


def mx(lin, mode):
    """MXFP8Linear; MXLinear until torchao 0.16, a wrapped weight in 0.17; emulated."""
    try:
        from torchao.prototype.mx_formats.config import MXLinearConfig
        from torchao.prototype.mx_formats.mx_linear import MXLinear
        return MXLinear.from_float(lin, config=MXLinearConfig(scale_calculation_mode=mode))
    except ImportError:
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    how = dict(scale_calculation_mode=mode, kernel_preference=KernelPreference.EMULATED)
    try:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        lin.__class__, lin.wgrad_with_hp = MXFP8Linear, False
        vars(lin).update(how)
    except ImportError:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
        from torchao.quantization import quantize_
        quantize_(nn.Sequential(lin), MXFP8TrainingOpConfig(**how), lambda m, n: isinstance(m, nn.Linear))
    return lin


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
