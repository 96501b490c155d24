"""te.checkpoint inside a reentrant te.checkpoint: recomputed with other scales than the forward had."""
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

def train(nested):
    torch.manual_seed(0)
    first, second = te.Linear(64, 64, bias=False), te.Linear(64, 64, bias=False)

    def inner(x):
        return te.checkpoint(first, x) if nested else first(x)

    for step in range(9):  # activations grow, by half in each step
        first.weight.grad = second.weight.grad = None
        x = (torch.randn(64, 64, device="cuda") * 1.5**step).requires_grad_()
        with autocast(DelayedScaling(amax_history_len=4)):
            y = te.checkpoint(lambda x: second(inner(x)), x)
        dy = torch.randn_like(y)
        y.backward(dy)
    truth = (dy.double() @ second.weight.double()).T @ x.double()
    return first.weight.grad, truth, second.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()

plain, truth, history = train(False)
again, _, other = train(True)
print("second layer's amax history of x, not nested:", [round(v, 3) for v in history])
print("                                      nested:", [round(v, 3) for v in other])
expected, got = far(plain, truth), far(again, truth)
print(f"error of the first layer's weight gradient: {expected:.3g} not nested, {got:.3g} nested")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if not torch.equal(plain, again) else 0)
