"""MX: conversion accepts any Linear; shapes that are not multiples of 32 (or empty) fail late with a bare error.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import warnings
warnings.simplefilter("ignore")
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


def attempt(name, m, x):
    try:
        y = m(x)
    except Exception as e:
        return f"{name}: FORWARD {type(e).__name__}: {' '.join(str(e).split())[:120]}"
    try:
        y.backward(torch.ones_like(y))
    except Exception as e:
        return f"{name}: BACKWARD {type(e).__name__}: {' '.join(str(e).split())[:120]}"
    return f"{name}: ok"


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for mode in (Mode.FLOOR, Mode.RCEIL):
    for dt in (torch.float32, torch.bfloat16):
        for shape, K, N in (((1, 64), 64, 32), ((64,), 64, 32), ((17, 64), 64, 32), ((3, 11, 64), 64, 32),
                            ((32, 64), 64, 48), ((32, 48), 48, 32), ((32, 0), 0, 32), ((32, 64), 64, 0)):
            x = torch.randn(shape).to(dt).requires_grad_()
            r = attempt(f"{mode} {dt} input {shape} in={K} out={N}", mx(nn.Linear(K, N, dtype=dt), mode), x)
            print(r)
            bad += not r.endswith(": ok")
m = mx(nn.Linear(64, 32), Mode.RCEIL)
m.weight.requires_grad_(False)
r = attempt("weight frozen, 17 tokens (grad_weight not needed)", m, torch.randn(17, 64, requires_grad=True))
r2 = attempt("input without grad, out=48 (grad_input not needed)", mx(nn.Linear(64, 48), Mode.RCEIL), torch.randn(32, 64))
print(r, r2, sep="\n")
sys.exit(bool(bad))
