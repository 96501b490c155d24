"""Amax histories and scales of deleted models are never freed."""
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
import gc, weakref

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

histories = []
for _ in range(3):
    model = te.Linear(32, 32, bias=False)
    with autocast(DelayedScaling(amax_history_len=4)):
        model(torch.ones(32, 32, device="cuda"))
    histories.append(weakref.ref(model.fp8_meta["scaling_fwd"].amax_history))
    del model
gc.collect()
alive = sum(history() is not None for history in histories)
print("three models were built, run and deleted; amax histories still held:", alive, "must be 0")
sys.exit(1 if alive else 0)
