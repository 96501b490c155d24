"""1.9 to 1.11: under a reentrant te.checkpoint, which is the default, gradient scales never move."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "1.11.0")
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

def train(checkpointed):
    torch.manual_seed(0)
    layer = te.Linear(256, 256, bias=False)
    for _ in range(4):
        x, target = torch.randn(2, 256, 256, device="cuda")
        x.requires_grad_()
        with autocast(DelayedScaling(amax_history_len=4)):
            y = te.checkpoint(layer, x) if checkpointed else layer(x)
        layer.weight.grad = None
        y.retain_grad()
        (y - target).square().mean().backward()
    meta = layer.fp8_meta["scaling_bwd"]
    error = far(layer.weight.grad, y.grad.double().T @ x.double())
    return meta.scale[0].item(), meta.amax_history[:, 0].tolist(), error

(want, history, expected), (scale, again, got) = train(False), train(True)
print(f"without checkpoint: gradient scale {want:.6g}, amax history {history}, error of the weight gradient {expected:.3g}")
print(f"with te.checkpoint: gradient scale {scale:.6g}, amax history {again}, error of the weight gradient {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if scale == 1.0 != want else 0)
