"""convert_to_float8_training: hooks, attributes and the training flag of a linear do not survive its conversion.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
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
layer, x = nn.Linear(64, 64), torch.randn(32, 64)
down, up = torch.randn(4, 64) / 8, torch.randn(64, 4) / 2
layer.register_forward_hook(lambda module, args, y: y + args[0] @ down.t() @ up.t())  # an adapter
want = layer(x)
got = convert_to_float8_training(nn.Sequential(layer))(x)
print(f"an adapter in a hook: output differs by {((got - want).norm() / want.norm()).item():.0%} (float8 alone: below 10%)")
print("hooks called, attribute, training")
print("before conversion:", *before)
print("after conversion: ", *after)
sys.exit(1 if before != after else 0)
