"""An evaluation under no_grad changes the scales of the training step after it."""
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

def run(evaluate):
    torch.manual_seed(0)
    model, recipe = te.Linear(64, 64, bias=False), DelayedScaling(amax_history_len=4)
    if evaluate:
        model.eval()
        with torch.no_grad(), autocast(recipe):
            model(torch.randn(64, 64, device="cuda") * 100)
        model.train()
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(64, 64, device="cuda")
        with autocast(recipe):
            y = model(x)
        y.sum().backward()
    meta = model.fp8_meta["scaling_fwd"]
    return far(y, x.double() @ model.weight.double().T), meta.scale[0].item(), meta.amax_history[:, 0]

expected, scale, history = run(False)
got, other, moved = run(True)
print(f"two training steps: scale of x {scale:.6g}, amax history {history.tolist()}, error {expected:.3g}")
print(f"after an evaluation with inputs 100 times as large: {other:.6g}, {moved.tolist()}, {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if scale != other else 0)
