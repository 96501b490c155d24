"""torchao 0.11's MX tensor: a block whose scale byte is 0 (amax < 2^-118) comes back exactly halved."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor

bad = 0
for dtype in (torch.float32, torch.bfloat16):
    for e in (-117, -118, -119, -121):  # amax = 1.5 * 2^e, byte = max(e - 8 + 127, 0)
        x = torch.full((1, 32), 1.5 * 2.0**e, dtype=dtype)
        mx = MXTensor.to_mx(x, torch.float8_e4m3fn, 32)
        scale = mx._scale_e8m0 if hasattr(mx, "_scale_e8m0") else mx.scale
        back = mx.to_dtype(dtype) if hasattr(mx, "to_dtype") else mx.dequantize(dtype)
        byte, ratio = int(scale.view(torch.uint8).reshape(-1)[0]), (back[0, 0] / x[0, 0]).item()
        print(f"{dtype}, amax 1.5 * 2^{e}: scale byte {byte}, comes back times {ratio}")
        bad += ratio == 0.5
sys.exit(bool(bad))
