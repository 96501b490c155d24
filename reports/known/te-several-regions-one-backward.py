"""One backward through forwards of two regions changes gradient scales in its middle."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

def far(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()

def train(regions):
    """Eight steps of two microbatches, in one region each or concatenated in one."""
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    first, second = te.Linear(64, 64, bias=False), te.Linear(64, 64, bias=False)
    for step in range(8):
        x = torch.randn(128, 64, device="cuda", requires_grad=True)
        dy = torch.randn(128, 64, device="cuda").to(second.weight.dtype)
        dy[:64] *= 16  # the second microbatch has the smaller gradients
        hs, ys = [], []
        for part in x.chunk(regions):
            with autocast(recipe):
                hs.append(first(part))
                ys.append(second(hs[-1]))
        second.weight.grad = None
        torch.autograd.backward(ys, list(dy.chunk(regions)))  # one loss over all
    truth = sum(d.double().T @ h.double() for h, d in zip(hs, dy.chunk(regions)))
    return far(second.weight.grad, truth)

one, two = train(1), train(2)
print(f"error of the second layer's weight gradient: {one:.3g} with one region, {two:.3g} with two")
sys.exit(1 if two > one + 0.01 else 0)
