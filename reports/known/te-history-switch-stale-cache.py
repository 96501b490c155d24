"""A weight cached under one amax history writes its maximum there after a resize, too."""
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
try:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
except ModuleNotFoundError:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # until 2.8

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

reset = FP8GlobalStateManager.reset

def maxima(first):
    """amax_history[0] of input and weight after a forward under another history."""
    layer = te.Linear(32, 32, bias=False)
    x, seen = torch.ones(32, 32, device="cuda"), []
    with autocast(DelayedScaling(amax_history_len=4)):
        layer(x, is_first_microbatch=first)
    try:
        with autocast(DelayedScaling(amax_history_len=8)):
            layer(x, is_first_microbatch=first)  # caches anew
            seen = layer.fp8_meta["scaling_fwd"].amax_history[0, :2].tolist()
    except RuntimeError:
        pass  # leaving the region fails for another reason: te-history-switch-crash
    reset()
    return seen

plain, cached = maxima(None), maxima(True)
print("amax of input and weight, not cached:", plain)
print("                          cached:    ", cached, "the weight's must not be 0")
sys.exit(1 if plain[1] > 0 and cached[1] == 0 else 0)
