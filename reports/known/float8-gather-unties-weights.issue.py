import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight


for gather in (False, True):
    model = Tied()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(model, config=config)
    tied = model.head.weight is model.embedding.weight
    print(f"enable_fsdp_float8_all_gather={gather}: tied {tied}, {len(list(model.parameters()))} parameters")
