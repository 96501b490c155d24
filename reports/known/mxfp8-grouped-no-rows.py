"""torchao's emulated MXFP8 product of groups: on a rank that got no token backward raises.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
from torchao.quantization.quantize_.common import KernelPreference

torch.set_num_threads(1)
offs, bad = torch.zeros(3, dtype=torch.int32), 0
emulated = lambda x, w: _to_mxfp8_then_scaled_grouped_mm(x, w, offs, kernel_preference=KernelPreference.EMULATED)
for title, multiply in (("torch._grouped_mm", lambda x, w: torch._grouped_mm(x, w, offs=offs)), ("MXFP8, emulated", emulated)):
    x = torch.zeros(0, 64, dtype=torch.bfloat16, requires_grad=True)
    w = torch.zeros(3, 96, 64, dtype=torch.bfloat16, requires_grad=True)
    y = multiply(x, w.transpose(-2, -1))
    try:
        y.backward(torch.zeros(0, 96, dtype=torch.bfloat16))
        print(f"{title}: backward of no rows runs, weight gradient {w.grad.abs().sum().item()}")
    except RuntimeError as error:
        print(f"{title}: backward of no rows raises: {str(error).splitlines()[0]}")
        bad += "strides should be multiple" in str(error)
sys.exit(bool(bad))
