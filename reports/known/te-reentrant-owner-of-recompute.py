"""1.9 to 1.11: inside autocast, the first recompute of a reentrant te.checkpoint updates gradients."""
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

def history(checkpointed):
    torch.manual_seed(0)
    layer, ys, found = te.Linear(32, 32, bias=False), [], []
    with autocast(DelayedScaling(amax_history_len=4)):
        for _ in range(2):
            x = torch.randn(32, 32, device="cuda", requires_grad=True)
            ys.append(te.checkpoint(layer, x, use_reentrant=True) if checkpointed else layer(x))
        for i in (1, 0):  # is_first_fp8_module was True for the first forward
            (ys[i].sum() * 2.0**i).backward()
            found.append(layer.fp8_meta["scaling_bwd"].amax_history[:, 0].tolist())
    return found

plain, again = history(False), history(True)
print("amax history of the gradient after each of two backwards inside autocast:")
print("without checkpoint:", plain)
print("with te.checkpoint:", again)
# 1.12 and later update in each of the two backwards instead: te-reentrant-segments-update
sys.exit(1 if again[1][0] > 0 else 0)
