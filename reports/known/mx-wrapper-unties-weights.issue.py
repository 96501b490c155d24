import torch
from torch import nn
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.quantization import quantize_

for config in (MXFP8TrainingOpConfig(), Float8TrainingOpConfig()):
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)})
    model.head.weight = model.embedding.weight
    model.head.weight.marked = True
    hooked = model.head.weight.register_hook(lambda grad: grad)
    quantize_(model, config)
    tied = model.head.weight is model.embedding.weight
    kept = hasattr(model.head.weight, "marked")
    hooks = bool(model.head.weight._backward_hooks)
    print(f"{type(config).__name__}: tied {tied}, attribute kept {kept}, hook kept {hooks}")
