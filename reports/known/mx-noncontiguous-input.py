"""MX: a non-contiguous input (2-D, or 3-D that flattens to a view) or weight dies with the single word "unsupported".
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
bad = 0
cases = {
    "2-D transposed": lambda: torch.randn(64, 32).t(), "2-D row step 2": lambda: torch.randn(64, 64)[::2],
    "2-D column slice": lambda: torch.randn(32, 128)[:, :64],
    "2-D expanded row": lambda: torch.randn(1, 64).expand(32, 64),
    "3-D last-dim slice": lambda: torch.randn(2, 32, 128)[..., :64],
    "3-D swapped batch/time": lambda: torch.randn(32, 2, 64).transpose(0, 1),
}
for name, make in cases.items():
    for dt in (torch.float32, torch.bfloat16):
        x = make()  # .to(bfloat16) would make slices contiguous: cast their storage, keep the strides
        if dt != x.dtype: x = torch.as_strided(torch.randn(64 * 128, dtype=dt), x.size(), x.stride())
        r = attempt(f"{dt} {name} stride {x.stride()}", mx(nn.Linear(64, 32, dtype=dt), Mode.RCEIL), x.requires_grad_())
        print(r)
        bad += not r.endswith(": ok")
lin = nn.Linear(64, 32)
lin.weight = nn.Parameter(lin.weight.data.t().contiguous().t())
print(r := attempt("column-major weight", mx(lin, Mode.RCEIL), torch.randn(32, 64, requires_grad=True)))
sys.exit(bool(bad or not r.endswith(": ok")))
