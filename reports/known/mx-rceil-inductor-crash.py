"""MX RCEIL under torch.compile(backend="inductor") on CPU: torch 2.11's code generator has no type for E8M0."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import logging
logging.disable(logging.CRITICAL)
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
for backend in ("aot_eager", "inductor"):
    for dt in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        m = torch.compile(mx(nn.Linear(64, 32, bias=False, dtype=dt), Mode.RCEIL), backend=backend)
        try:
            y = m(torch.randn(32, 64).to(dt).requires_grad_())
            y.sum().backward()
            print(backend, dt, "ok")
        except Exception as e:
            print(backend, dt, type(e).__name__ + ":", " ".join(str(e).split())[:120])
            bad += 1
sys.exit(bool(bad))
