"""te.checkpoint(te.Linear, x, use_reentrant=False): backward raises where x needs no gradient.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

torch.manual_seed(0)
recipe = DelayedScaling(amax_history_len=4)
bad = 0
for checkpointed, needs in ((False, False), (True, True), (True, False)):
    layer = te.Linear(32, 32, bias=False)
    x = torch.randn(32, 32).cuda().requires_grad_(needs)
    with te.autocast(enabled=True, recipe=recipe):
        y = te.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    what = f"checkpoint={checkpointed} x.requires_grad={needs}:"
    try:
        y.sum().backward()
        print(what, "weight gradient", tuple(layer.weight.grad.shape))
    except IndexError as error:
        bad += 1
        print(what, "IndexError:", error)
sys.exit(1 if bad else 0)
