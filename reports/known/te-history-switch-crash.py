"""A model cannot go on with another amax_history_len."""
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

shown, model = 0, te.Linear(32, 32, bias=False)
for length in (4, 8):
    try:
        with autocast(DelayedScaling(amax_history_len=length)):
            y = model(torch.ones(32, 32, device="cuda"))
        y.sum().backward()
        print("amax_history_len", length, "runs")
    except RuntimeError as error:
        shown += 1
        print("amax_history_len", length, "must run too, got RuntimeError:", str(error).splitlines()[0])
sys.exit(1 if shown else 0)
