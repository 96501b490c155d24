"""quantize_ with Float8BlockwiseLinearConfig: hooks, attributes and the training flag of a linear do not survive its conversion.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
if not torch.cuda.is_available() or torch.empty(1, device="cuda").device.type != "cuda":
    print("cannot tell: the kernels are a GPU's, and there is no GPU")
    sys.exit(125)
from torchao.prototype.blockwise_fp8_training import kernels
from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig
from torchao.quantization import quantize_

for kernel in vars(kernels).values():
    if hasattr(kernel, "configs"):  # to try each candidate takes a minute a shape
        kernel.configs = kernel.configs[:1]


def converted(model):
    quantize_(model.to("cuda", torch.bfloat16), Float8BlockwiseLinearConfig(), lambda module, name: isinstance(module, nn.Linear))
    return model


model = nn.Sequential(nn.Linear(128, 128, bias=False)).eval()
model[0].tag, calls = "first", []
model[0].register_forward_hook(lambda *a: calls.append("forward"))
model[0].register_full_backward_hook(lambda *a: calls.append("backward"))
model.to("cuda", torch.bfloat16)


def use():
    calls.clear()
    model(torch.randn(128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return sorted(calls), getattr(model[0], "tag", None), model[0].training


before = use()
converted(model)
after = use()
print("hooks called, attribute, training")
print("before conversion:", *before)
print("after conversion: ", *after)
sys.exit(1 if before != after else 0)
