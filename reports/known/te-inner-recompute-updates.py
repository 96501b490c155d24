"""te.checkpoint of 1.x: an autocast inside it is outermost in the recompute, and updates once more."""
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

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

def far(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()

def largest(history):
    return history.amax(dim=0)

recipe = DelayedScaling(amax_history_len=8, amax_compute_algo=largest)

def train(inner):
    """Checkpointed either way; later versions update again without an inner region, too."""
    torch.manual_seed(0)
    layer = te.Linear(64, 64, bias=False)

    def block(x):
        with autocast(recipe):
            return layer(x)

    for step in range(7):  # the first and the last input are 16 times as large
        x = (torch.randn(64, 64, device="cuda") * (16 if step in (0, 6) else 1)).requires_grad_()
        with autocast(recipe):
            y = te.checkpoint(block if inner else layer, x, use_reentrant=False)
        y.sum().backward()
    history = layer.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()
    return [round(v, 2) for v in history], far(y, x.double() @ layer.weight.double().T)

(plain, expected), (again, got) = train(False), train(True)
print("amax history of x, autocast outside te.checkpoint:", plain, f"error {expected:.3g}")
print("amax history of x, another one inside it:         ", again, f"error {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if again != plain else 0)
