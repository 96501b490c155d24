"""convert_to_float8_training replaces a subclass of nn.Linear by a plain float8 linear: its forward, parameters and children are gone.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

torch.set_num_threads(1)
torch.manual_seed(0)


class LoraLinear(nn.Linear):
    def __init__(self, size, rank=4):
        super().__init__(size, size)
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Parameter(torch.randn(size, rank))

    def forward(self, x):
        return super().forward(x) + self.down(x) @ self.up.t()


model, x = nn.Sequential(LoraLinear(32)), torch.randn(32, 32)
want, names = model(x), set(dict(model.named_parameters()))
convert_to_float8_training(model)
got, left = model(x), set(dict(model.named_parameters()))
error = ((got - want).norm() / want.norm()).item()
print(f"{type(model[0]).__name__}: output differs by {error:.0%} (float8 alone: below 10%)")
print("parameters gone:", sorted(names - left))
try:
    convert_to_float8_training(LoraLinear(32))
    print("the same layer as the root: converted")
except AssertionError as refusal:
    print("the same layer as the root is refused:", str(refusal).split(":")[0])
sys.exit(1 if error > 0.2 or names != left else 0)
