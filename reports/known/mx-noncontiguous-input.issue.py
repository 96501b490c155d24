import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

model = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
quantize_(model, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED))
x = torch.randn(64, 64, dtype=torch.bfloat16)
inputs = {"x": x, "x.t()": x.t(), "x[::2]": x[::2], "x.expand": x[:1].expand(64, 64)}
for name, values in inputs.items():
    try:
        model(values)
        print(f"{name}: ok")
    except AssertionError as error:
        print(f"{name}: AssertionError: {error}")
