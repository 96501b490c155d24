"""convert_to_float8_training: hooks, attributes and the training flag of a linear do not survive its conversion.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
import sys
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
model[0].tag = "first"
calls = []
model[0].register_forward_hook(lambda *a: calls.append("forward"))
model[0].register_forward_pre_hook(lambda *a: calls.append("forward_pre"))
model[0].register_full_backward_hook(lambda *a: calls.append("backward"))
model[0].register_state_dict_post_hook(lambda *a: calls.append("state_dict"))


def use():
    calls.clear()
    model(torch.randn(32, 32)).sum().backward()
    model.state_dict()
    return sorted(calls), getattr(model[0], "tag", None), model[0].training


before = use()
convert_to_float8_training(model)
after = use()
print("hooks called, attribute, training")
print("before conversion:", *before)
print("after conversion: ", *after)
sys.exit(1 if before != after else 0)
