"""te.checkpoint: a recompute takes the scales of the oldest forward that still waits, not its own.
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

recipe = DelayedScaling(amax_history_len=4)


def gradient(checkpointed, drop):
    torch.manual_seed(0)
    layer, ys = te.Linear(32, 32, bias=False), []
    for i in range(2):
        x = torch.randn(32, 32).mul(16**i).cuda().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            ys.append(te.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x))
    (ys[1].sum() if drop else ys[0].sum() + ys[1].sum()).backward()
    return layer.weight.grad


bad = 0
for drop in (False, True):
    plain, again = gradient(False, drop), gradient(True, drop)
    far = ((again - plain).norm() / plain.norm()).item()
    losses = "only the second in the loss" if drop else "both in one loss"
    print(f"two forwards, {losses}: gradient off by {far:.3g} under te.checkpoint, must be 0")
    bad += far > 0
sys.exit(1 if bad else 0)
