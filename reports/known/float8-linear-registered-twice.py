"""convert_to_float8_training: of a linear with two names in one parent, one is converted; of one in two parents, two are made.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

torch.set_num_threads(1)
shared = nn.Linear(32, 32)
one = nn.Sequential(shared, nn.ReLU(), shared)
convert_to_float8_training(one)
print("one parent: ", [type(m).__name__ for m in one])
shared = nn.Linear(32, 32)
two = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
convert_to_float8_training(two)
kinds = [type(m[0]).__name__ for m in two]
print("two parents:", kinds, "one object" if two[0][0] is two[1][0] else "two objects")
print("weights still tied:", one[0].weight is one[2].weight and two[0][0].weight is two[1][0].weight)
model = nn.Module()
model.first = model.second = nn.Linear(32, 32, bias=False)
convert_to_float8_training(model)
names = type(model.first).__name__, type(model.second).__name__
print("attributes: ", names, "one weight:", model.first.weight is model.second.weight)
bad = type(one[0]) is not type(one[2]) or two[0][0] is not two[1][0] or names[0] != names[1]
sys.exit(1 if bad else 0)
