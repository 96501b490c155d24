"""convert_to_float8_training: a layer used under two names is converted under one of them only."""
import os
os.environ["OMP_NUM_THREADS"] = "1"
import sys
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

torch.set_num_threads(1)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x))


model = Shared()
assert model.first is model.second
model = convert_to_float8_training(model)
print("first: ", type(model.first).__name__)
print("second:", type(model.second).__name__)
print("one module:", model.first is model.second, " one weight:", model.first.weight is model.second.weight)
sys.exit(type(model.first) is not type(model.second))
