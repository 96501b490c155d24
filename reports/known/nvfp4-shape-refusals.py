"""torchao NVFP4 training: sizes that are no multiple of 128 are refused without the name of the layer.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
try:  # Triton's interpreter runs the kernels: --with triton==3.6.0, or pip install triton==3.6.0
    import triton_on_cpu

    triton_on_cpu.install_torchao()
except (ImportError, ValueError) as why:
    print(f"cannot tell: the kernels are Triton's; {why}")
    sys.exit(125)
from torch.nn import functional
from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig
from torchao.quantization import quantize_
from triton_on_cpu.products import nvfp4_scaled_mm

functional.scaled_mm = nvfp4_scaled_mm  # a CPU has no kernel for it


def converted(model):
    quantize_(model.bfloat16(), NVFP4TrainingConfig(rht_sign_vector=(1,) * 16), lambda module, name: isinstance(module, nn.Linear))
    return model


bad = 0
for tokens, sizes in ((128, (128, 128)), (96, (128, 128)), (128, (64, 128)), (128, (128, 64))):
    model = converted(nn.Sequential(nn.Linear(*sizes, bias=False)))
    what = f"{tokens} tokens, {sizes[0]} to {sizes[1]} features"
    try:
        model(torch.randn(tokens, sizes[0], dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        print(f"{what}: runs")
    except ValueError as error:
        print(f"{what}: ValueError: {error}")
        bad += 1
sys.exit(bool(bad))
