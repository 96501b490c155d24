"""MX weight wrapper: mm / matmul / @ / addmm / keyword linear compute x @ W^T or die, whatever was asked.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
import torch.nn.functional as F
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference


def mq(lin, mode):
    seq = nn.Sequential(lin)
    quantize_(seq, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED,
                                         scale_calculation_mode=mode))
    return seq[0]


torch.set_num_threads(1)
torch.manual_seed(0)
lin = nn.Linear(32, 32, bias=False)
plain = lin.weight.detach().clone()
w = mq(lin, Mode.RCEIL).weight
x = torch.randn(32, 32)
wt = mq(nn.Linear(64, 32, bias=False), Mode.RCEIL).weight
bad = 0


def show(name, fn, want):
    global bad
    try:
        got = fn()
        rel = ((got - want).norm() / want.norm()).item()
        print(f"{name}: relative error to the asked product {rel:.3f}")
        bad += rel > 0.2
    except Exception as e:
        print(f"{name}: {type(e).__name__}: {' '.join(str(e).split())[:110]}")
        bad += 1


with torch.no_grad():
    show("F.linear(x, W)            ", lambda: F.linear(x, w), x @ plain.t())
    show("torch.mm(x, W)    (square)", lambda: torch.mm(x, w), x @ plain)
    show("torch.matmul(x, W)(square)", lambda: torch.matmul(x, w), x @ plain)
    show("x @ W             (square)", lambda: x @ w, x @ plain)
    show("x @ W.t()                 ", lambda: x @ w.t(), x @ plain.t())
    show("torch.addmm(b, x, W.t())  ", lambda: torch.addmm(torch.zeros(32), x, w.t()), x @ plain.t())
    show("W @ x                     ", lambda: w @ x, plain @ x)
    show("F.linear(x, weight=W)     ", lambda: F.linear(x, weight=w), x @ plain.t())
sys.exit(bool(bad))
