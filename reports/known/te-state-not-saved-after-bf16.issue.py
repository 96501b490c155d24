import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

layer = te.Linear(32, 32)
x = torch.randn(32, 32, device="cuda")
for _ in range(3):
    with te.autocast(recipe=DelayedScaling()):
        y = layer(x)
    y.sum().backward()
print("extra state after three FP8 steps:", layer.get_extra_state().numel(), "bytes")
with torch.no_grad():
    layer(x)  # a validation in high precision
print("extra state after a forward in high precision:", layer.get_extra_state().numel(), "bytes")
