"""te.checkpoint: an evaluation in high precision before backward turns the recompute into a forward."""
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

def train(steps, evaluate):
    """Scale of x after that many steps, and the next step's error."""
    torch.manual_seed(0)
    layer = te.Linear(64, 64, bias=False)
    for step in range(steps + 1):  # activations grow, by half in each step
        x = (torch.randn(64, 64, device="cuda") * 1.5**step).requires_grad_()
        if step == steps:
            scale = layer.fp8_meta["scaling_fwd"].scale[0].item()
        with autocast(DelayedScaling(amax_history_len=4)):
            y = te.checkpoint(layer, x, use_reentrant=False)
        if evaluate and step == steps - 1:
            with torch.no_grad():
                layer(x)  # outside every autocast
        if step < steps:
            y.sum().backward()
    return scale, far(y, x.double() @ layer.weight.double().T)

bad = 0
for steps in (1, 4):
    want, expected = train(steps, False)
    try:
        scale, got = train(steps, True)
        print(f"step {steps}: scale of x after it {scale:.6g}, must be {want:.6g};"
              f" error of the next output {got:.3g}, must be {expected:.3g}; excess {got - expected:.3g}")
        bad += scale != want
    except (KeyError, IndexError) as error:
        print(f"step {steps}: backward raises {type(error).__name__}: {error}")
        bad += 1
sys.exit(1 if bad else 0)
