"""te.checkpoint of 1.x: a forward in high precision is recomputed in FP8 if backward stands in a region.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "1.12.0")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

recipe = DelayedScaling(amax_history_len=4)
torch.manual_seed(0)
layer, runs = te.Linear(32, 32, bias=False), []


def block(x):
    runs.append(FP8GlobalStateManager.is_fp8_enabled())
    return layer(x)


def gradient(checkpointed):
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
    y = te.checkpoint(block, x, use_reentrant=True) if checkpointed else layer(x)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y.square().sum().backward()
    return x.grad


with te.fp8_autocast(enabled=True, fp8_recipe=recipe):  # without a step in FP8 it is a KeyError
    y = te.checkpoint(block, torch.randn(32, 32).cuda().requires_grad_(), use_reentrant=True)
y.sum().backward()
runs.clear()
plain, again = gradient(False), gradient(True)
far = ((again - plain).norm() / plain.norm()).item()
print(f"in FP8: forward {runs[0]}, recompute {runs[1]}; gradient off by {far:.3g}, must be 0")
sys.exit(1 if runs[0] != runs[1] else 0)
