"""torchao's MXFP8 product of groups: with wgrad_with_hp and fp32 operands backward raises.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
from torchao.quantization.quantize_.common import KernelPreference

torch.set_num_threads(1)
torch.manual_seed(0)
offs = torch.tensor([32, 96], dtype=torch.int32)
bad = 0
for dtype in (torch.bfloat16, torch.float32):
    for hp in (False, True):
        x = torch.randn(96, 32, dtype=dtype, requires_grad=True)
        w = torch.randn(2, 64, 32, dtype=dtype, requires_grad=True)
        y = _to_mxfp8_then_scaled_grouped_mm(
            x, w.transpose(-2, -1), offs=offs, kernel_preference=KernelPreference.EMULATED, wgrad_with_hp=hp
        )
        try:
            y.backward(torch.ones_like(y))
            print(f"{dtype}, wgrad_with_hp={hp}: runs, output {y.dtype}, gradient {w.grad.dtype}")
        except RuntimeError as error:
            bad += hp and dtype == torch.float32 and "same dtype" in str(error)
            print(f"{dtype}, wgrad_with_hp={hp}: backward raises: {error}")
sys.exit(bool(bad))
