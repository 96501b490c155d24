"""A layer whose output reaches no loss stops the gradient scales of all others."""
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

def train(used):
    torch.manual_seed(0)
    first, second = te.Linear(256, 256, bias=False), te.Linear(256, 256, bias=False)
    for _ in range(4):
        x, target = torch.randn(2, 256, 256, device="cuda")
        x.requires_grad_()
        with autocast(DelayedScaling(amax_history_len=4)):
            auxiliary, y = first(x), second(x)
        loss = (y - target).square().mean()
        if used:
            loss = loss + 1e-3 * auxiliary.square().mean()
        second.weight.grad = None
        y.retain_grad()
        loss.backward()
    scale = second.fp8_meta["scaling_bwd"].scale[0].item()
    return scale, far(second.weight.grad, y.grad.double().T @ x.double())

(want, expected), (scale, got) = train(True), train(False)
print(f"first layer in the loss: gradient scale of the second {want:.6g}, error of its weight gradient {expected:.3g}")
print(f"first layer unused:      gradient scale of the second {scale:.6g}, error of its weight gradient {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if scale == 1.0 != want else 0)
