import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.quantization import quantize_

model = nn.Sequential(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))
nn.init.zeros_(model[0].weight)  # a projection that starts at zero
x = torch.randn(4, 32, dtype=torch.bfloat16)
print("before quantize_:", model(x)[0, :3].tolist())
quantize_(model, NVFP4WeightOnlyConfig())
print("after quantize_: ", model(x)[0, :3].tolist())
