"""te.checkpoint of 1.x: what ran in high precision is recomputed in FP8 if backward stands in autocast."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "1.12.0")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

def far(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()

torch.manual_seed(0)
layer, runs = te.Linear(64, 64, bias=False), []

def block(x):
    runs.append(FP8GlobalStateManager.is_fp8_enabled())
    return layer(x)

def gradient(checkpointed):
    layer.weight.grad = None
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = te.checkpoint(block, x, use_reentrant=True) if checkpointed else layer(x)
    dy = torch.randn_like(y)
    with autocast(DelayedScaling(amax_history_len=4)):
        y.backward(dy)
    return far(layer.weight.grad, dy.double().T @ x.double())

with autocast(DelayedScaling(amax_history_len=4)):  # without a step in FP8 it is a KeyError
    y = te.checkpoint(block, torch.randn(64, 64, device="cuda", requires_grad=True), use_reentrant=True)
y.sum().backward()
runs.clear()
expected, got = gradient(False), gradient(True)
print(f"in FP8: forward {runs[0]}, recompute {runs[1]}")
print(f"error of the weight gradient {expected:.3g} without checkpoint, {got:.3g} with it; excess {got - expected:.3g}")
sys.exit(1 if runs[0] != runs[1] else 0)
