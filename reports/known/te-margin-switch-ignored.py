"""A layer keeps the margin of its first forward."""
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

def run(*margins):
    torch.manual_seed(0)
    layer = te.Linear(64, 64, bias=False)
    for step, margin in enumerate(margins):  # activations grow fourfold in the last step
        x = torch.randn(64, 64, device="cuda") * (4 if step == len(margins) - 1 else 1)
        scale = layer.fp8_meta["scaling_fwd"].scale[0].item() if step else 1.0
        with autocast(DelayedScaling(amax_history_len=4, margin=margin)):
            y = layer(x)
    return scale, far(y, x.double() @ layer.weight.double().T)

(want, expected), (scale, got) = run(3, 3, 3), run(0, 3, 3)
print(f"margin 3 in three steps:              scale of x {want:.6g}, error {expected:.3g}")
print(f"margin 0 in one step, 3 in two steps: scale of x {scale:.6g}, error {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if scale > 4 * want else 0)
