import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
nn.init.constant_(model[0].bias, 100.0)
x = torch.randn(32, 64, dtype=torch.bfloat16)


def report(when):
    y = model(x)
    y.sum().backward()
    grad = model[0].bias.grad
    told = "None" if grad is None else f"{grad[0].item():.0f}"
    print(f"{when} quantize_: mean output {y.mean().item():.0f}, bias.grad {told}")
    model.zero_grad()


report("before")
# emulated, so that it runs on any device; the bias is dropped before a kernel is chosen
quantize_(model, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED))
report("after")
