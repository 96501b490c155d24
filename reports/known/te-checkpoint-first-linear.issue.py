import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

for requires_grad in (True, False):
    layer = te.Linear(32, 32, bias=False)
    x = torch.randn(32, 32, device="cuda", requires_grad=requires_grad)
    with te.autocast(recipe=DelayedScaling()):
        y = te.checkpoint(layer, x, use_reentrant=False)
    try:
        y.sum().backward()
        print(f"x.requires_grad={requires_grad}: ok")
    except IndexError as error:
        print(f"x.requires_grad={requires_grad}: IndexError: {error}")
