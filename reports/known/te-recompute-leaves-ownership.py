"""te.checkpoint: backward inside autocast makes the region's next forward update gradients, too."""
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

def history(checkpointed):
    torch.manual_seed(0)
    layer = te.Linear(32, 32, bias=False)
    with autocast(DelayedScaling(amax_history_len=4)):
        for microbatch in range(3):
            x = torch.randn(32, 32, device="cuda", requires_grad=True)
            y = te.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            (y.sum() * 2.0**microbatch).backward()
    return layer.fp8_meta["scaling_bwd"].amax_history[:, 0].tolist()

plain, again = history(False), history(True)
print("three microbatches in one autocast, amax history of the gradient:")
print("without checkpoint:", plain)
print("with te.checkpoint:", again)
sys.exit(1 if again != plain else 0)
