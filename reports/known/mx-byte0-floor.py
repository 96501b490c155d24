"""MX FLOOR: a block whose scale byte is 0 (amax < 2^-118) comes back exactly halved.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.mx_formats.mx_tensor import MXTensor

torch.set_num_threads(1)
torch.manual_seed(0)


def mx(x):
    """Cast by to_mx, whose default is FLOOR, and back; and the byte of the first scale."""
    cast = MXTensor.to_mx(x, torch.float8_e4m3fn, 32)
    scale = cast._scale_e8m0 if hasattr(cast, "_scale_e8m0") else cast.scale
    back = cast.to_dtype if hasattr(cast, "to_dtype") else cast.dequantize  # 0.11's name, and 0.18's
    return back(x.dtype), int(scale.view(torch.uint8).reshape(-1)[0])


def layer(dtype):
    """MXFP8Linear, which torchao 0.11 does not have: its weight keeps the output far from subnormals."""
    try:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    except ImportError:
        return None
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    new = MXFP8Linear(32, 32, bias=False, dtype=dtype, scale_calculation_mode=ScaleCalculationMode.FLOOR,
                      kernel_preference=KernelPreference.EMULATED)
    new.weight = nn.Parameter(torch.eye(32, dtype=dtype) * 2.0**40)
    return new


bad = 0
for dtype in (torch.float32, torch.bfloat16):
    linear = layer(dtype)
    for e in (-117, -118, -119, -121):  # block amax = 1.5 * 2^e; byte = max(e - 8 + 127, 0)
        x = torch.full((1, 32), 1.5 * 2.0**e, dtype=dtype)  # 1.5 is on the E4M3 grid: no rounding at all
        back, byte = mx(x)
        ratio = (back[0, 0] / x[0, 0]).item()
        product = linear(x)[0, 0].item() / (1.5 * 2.0 ** (e + 40)) if linear else None
        print(f"{dtype}, amax 1.5 * 2^{e}: scale byte {byte}, comes back times {ratio}; a layer's product times {product}")
        bad += ratio != 1 or product not in (None, 1)
sys.exit(bool(bad))
