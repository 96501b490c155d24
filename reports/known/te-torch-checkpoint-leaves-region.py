"""torch's checkpoint without reentrance, of a TransformerEngine layer that ran in FP8: backward raises."""
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
from torch.utils.checkpoint import checkpoint

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

def far(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()

bad = 0
for name, by in (("te.checkpoint", te.checkpoint), ("torch", checkpoint)):
    torch.manual_seed(0)
    layer = te.Linear(64, 64, bias=False)
    try:
        for _ in range(2):
            x = torch.randn(64, 64, device="cuda", requires_grad=True)
            with autocast(DelayedScaling(amax_history_len=4)):
                y = by(layer, x, use_reentrant=False)
            layer.weight.grad, dy = None, torch.randn_like(y)
            y.backward(dy)
    except Exception as error:
        print(f"{name}: {type(error).__name__}:", str(error).splitlines()[0][:90])
        bad += "te.checkpoint" not in str(error)  # that would be a refusal in words
        continue
    scale = layer.fp8_meta["scaling_bwd"].scale[0].item()
    error = far(layer.weight.grad, dy.double().T @ x.double())
    print(f"{name}: error of the weight gradient {error:.3g}; gradient scale {scale:.6g}")
sys.exit(1 if bad else 0)
