"""te.checkpoint(te.Linear, x, use_reentrant=False): backward raises where x needs no gradient."""
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

bad = 0
for name, make in (("Linear", te.Linear), ("LayerNormLinear", te.LayerNormLinear)):
    for checkpointed, needs in ((False, False), (True, True), (True, False)):
        layer = make(32, 32, bias=False)
        x = torch.randn(32, 32, device="cuda", requires_grad=needs)
        with autocast(DelayedScaling(amax_history_len=4)):
            y = te.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        what = f"{name}, checkpoint={checkpointed}, x.requires_grad={needs}:"
        try:
            y.sum().backward()
            print(what, "has a weight gradient")
        except IndexError as error:
            bad += 1
            print(what, "IndexError:", error)
sys.exit(1 if bad else 0)
