"""torchao's MXFP8 product of groups: a gradient that is not contiguous dies in backward with the single word "unsupported".
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
gradient = torch.randn(64, 96).bfloat16().t()
bad = 0
for title, grad in (("contiguous", gradient.contiguous()), ("transposed", gradient), ("expanded", gradient[:1, :1].expand(96, 64))):
    x = torch.randn(96, 32).bfloat16().requires_grad_()
    w = torch.randn(2, 64, 32).bfloat16().requires_grad_()
    y = _to_mxfp8_then_scaled_grouped_mm(x, w.transpose(-2, -1), offs=offs, kernel_preference=KernelPreference.EMULATED)
    try:
        y.backward(grad)
        print(f"a gradient that is {title} runs")
    except AssertionError as error:
        bad += title != "contiguous" and str(error) == "unsupported"
        print(f"a gradient that is {title} raises AssertionError: {error}")
sys.exit(bool(bad))
