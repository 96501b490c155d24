"""Two recipes that differ in amax_compute_algo only: the one entered last updates both models."""
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

def train(other_length):
    """Gradient scale of model a in the last step, and the error of its weight gradient."""
    torch.manual_seed(0)
    a, b = te.Linear(64, 64, bias=False), te.Linear(64, 64, bias=False)
    for size in (16, 1, 16):  # a's gradient grows again: "max" remembers, "most_recent" does not
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        with autocast(DelayedScaling(amax_history_len=4, amax_compute_algo="max")):
            ya = a(x)
        with autocast(DelayedScaling(amax_history_len=other_length, amax_compute_algo="most_recent")):
            yb = b(x)
        da, db = torch.randn_like(ya) * size, torch.randn_like(yb)
        a.weight.grad, scale = None, a.fp8_meta["scaling_bwd"].scale[0].item()
        torch.autograd.backward([ya, yb], [da, db])
    return scale, far(a.weight.grad, da.double().T @ x.double())

right, expected = train(5)  # with another length the recipes have different keys
wrong, got = train(4)
print(f"a has 'max', b 'most_recent' and another length: a's gradient scale {right:.6g}, error {expected:.3g}")
print(f"a has 'max', b 'most_recent' and a's own length: a's gradient scale {wrong:.6g}, error {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if right != wrong else 0)
