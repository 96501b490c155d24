"""autocast opened inside te.checkpoint: backward raises KeyError."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "2.18.0")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

def autocast(recipe):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # what older releases call it

layer, recipe = te.Linear(32, 32), DelayedScaling(amax_history_len=4)

def block(x):
    with autocast(recipe):
        return layer(x)

bad = 0
for reentrant in (True, False):
    x = torch.randn(32, 32, device="cuda", requires_grad=True)
    y = te.checkpoint(block, x, use_reentrant=reentrant)
    try:
        y.sum().backward()
    except KeyError as error:
        print(f"use_reentrant={reentrant}: backward raises KeyError: {error}")
        bad += 1
    else:
        print(f"use_reentrant={reentrant}: backward runs")
sys.exit(1 if bad else 0)
