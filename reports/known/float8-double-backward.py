"""float8: a second derivative, as of a gradient penalty, raises an AssertionError inside of the second backward.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import dataclasses
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

torch.set_num_threads(1)
torch.manual_seed(0)


def float8(recipe):
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(nn.Sequential(nn.Linear(64, 32, bias=False)), config=config)


models = {"nn.Linear": nn.Linear(64, 32, bias=False)}
models |= {name: float8(name) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")}
raised = 0
for name, model in models.items():
    x = torch.randn(32, 64, requires_grad=True)
    y = model(x)
    g, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        (y.sum() + g.square().sum()).backward()
        print(f"{name}: gradient has graph {g.requires_grad}, and a second derivative")
    except AssertionError as error:
        print(f"{name}: gradient has graph {g.requires_grad}, second backward: {' '.join(str(error).split())[:110]}")
        raised += "for mm inputs but found" in str(error)
sys.exit(bool(raised))
