"""Forward scales stay at 1 in an autocast inside autocast(enabled=False)."""
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

def train(outer_enabled):
    torch.manual_seed(0)
    layer, recipe = te.Linear(512, 512, bias=False), DelayedScaling(amax_history_len=4)
    for _ in range(4):
        x = torch.randn(512, 512, device="cuda")
        with autocast(recipe, outer_enabled), autocast(recipe):
            y = layer(x)
        y.sum().backward()
    return layer.fp8_meta["scaling_fwd"].scale[:2].tolist(), far(y, x.double() @ layer.weight.double().T)

(scales, expected), (stuck, got) = train(True), train(False)
print(f"inside an enabled autocast: scales of x and weight {scales} after 4 steps, error {expected:.3g}")
print(f"inside a disabled autocast: scales of x and weight {stuck} after 4 steps, error {got:.3g}")
print(f"excess error {got - expected:.3g} with default weights")
sys.exit(1 if stuck == [1.0, 1.0] else 0)
