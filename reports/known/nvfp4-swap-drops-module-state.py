"""quantize_ with NVFP4TrainingConfig drops hooks, attributes and the training flag of a linear.
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


model = nn.Sequential(nn.Linear(128, 128, bias=False)).eval()
model[0].tag, calls = "first", []
model[0].register_forward_hook(lambda *a: calls.append("forward"))
model[0].register_full_backward_hook(lambda *a: calls.append("backward"))
model.bfloat16()


def use():
    calls.clear()
    model(torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return sorted(calls), getattr(model[0], "tag", None), model[0].training


before = use()
converted(model)
after = use()
print("hooks called, attribute, training")
print("before conversion:", *before)
print("after conversion: ", *after)
sys.exit(1 if before != after else 0)
