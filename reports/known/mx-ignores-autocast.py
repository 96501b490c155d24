"""MX: torch.autocast has no effect on the converted layer; nn.Linear and Float8Linear give the autocast type.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import dataclasses
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training, Float8LinearConfig


def f8(lin, recipe, emulate):
    cfg = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(nn.Sequential(lin), config=cfg)[0]
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
x, bad = torch.randn(32, 64), 0
for name, m in (("nn.Linear", nn.Linear(64, 32)), ("float8 rowwise", f8(nn.Linear(64, 32), "rowwise", True)),
                ("MX RCEIL", mx(nn.Linear(64, 32), Mode.RCEIL)), ("MX FLOOR", mx(nn.Linear(64, 32), Mode.FLOOR))):
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
    print(f"{name}: output {y.dtype} under autocast(bfloat16)")
    bad += y.dtype != torch.bfloat16
sys.exit(bool(bad))
