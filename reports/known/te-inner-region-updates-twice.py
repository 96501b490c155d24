"""An autocast inside another one makes both update gradient scales, if it comes first."""
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

def largest(history):
    return history.amax(dim=0)

recipe = DelayedScaling(amax_history_len=8, amax_compute_algo=largest)

def train(nested):
    """History of the second layer's gradient and the error of its weight gradient, at the end."""
    torch.manual_seed(0)
    first, second = te.Linear(64, 64, bias=False), te.Linear(64, 64, bias=False)
    for step in range(7):  # the first and the last gradient are 16 times as large
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        with autocast(recipe):
            if nested:
                with autocast(recipe):
                    h = first(x)
            else:
                h = first(x)
            y = second(h)
        second.weight.grad, dy = None, torch.randn_like(y) * (16 if step in (0, 6) else 1)
        y.backward(dy)
    history = second.fp8_meta["scaling_bwd"].amax_history[:, 0].tolist()
    return [round(v, 2) for v in history], far(second.weight.grad, dy.double().T @ h.double())

(plain, expected), (again, got) = train(False), train(True)
print("history of the gradient, one region:        ", plain, f"error {expected:.3g}")
print("with the first layer in a region inside it: ", again, f"error {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if again != plain else 0)
