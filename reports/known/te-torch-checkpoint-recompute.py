"""torch's reentrant checkpoint of a TransformerEngine layer: what ran in FP8 is recomputed in high precision."""
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
for inside in (False, True):  # does a region stand around backward?
    for name, by in (("te.checkpoint", te.checkpoint), ("torch", checkpoint)):
        torch.manual_seed(0)
        layer, recipe = te.Linear(64, 64, bias=False), DelayedScaling(amax_history_len=4)
        for step in range(2):
            x = torch.randn(64, 64, device="cuda", requires_grad=True)
            with autocast(recipe):
                y = by(layer, x, use_reentrant=True)
            layer.weight.grad, dy = None, torch.randn_like(y)
            updated = layer.fp8_meta["scaling_fwd"].amax_history[0, 0].item()  # 0: taken in by the region's end
            with autocast(recipe, enabled=inside):
                y.backward(dy)
                left = layer.fp8_meta["scaling_fwd"].amax_history[0, 0].item()
        scale = layer.fp8_meta["scaling_bwd"].scale[0].item()
        error = far(layer.weight.grad, dy.double().T @ x.double())
        print(f"{name}, backward {'inside' if inside else 'outside'} a region: error of the weight gradient {error:.3g}; "
              f"gradient scale {scale:.6g}; maximum of the input noted by backward: {left - updated:.3g}")
        bad += name == "torch" and (left > updated if inside else error < 1e-3 and scale == 1)
sys.exit(1 if bad else 0)
