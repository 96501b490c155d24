"""Reentrant te.checkpoint: every segment's backward updates all gradients' scales.
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


def largest(history):
    return history.amax(dim=0)


def history(algorithm, calls, reentrant):
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
    layers = [te.Linear(32, 32, bias=False) for _ in range(2)]
    h = torch.randn(32, 32).cuda().requires_grad_()
    with te.autocast(enabled=True, recipe=recipe):
        for i in calls:
            h = te.checkpoint(layers[i], h, use_reentrant=reentrant)
    h.sum().backward()
    return [round(x, 4) for x in layers[calls[-1]].fp8_meta["scaling_bwd"].amax_history[:, 0].tolist()]


bad = 0
for what, algorithm, calls in (
    ("one layer called twice, bulk update", "max", (0, 0)),
    ("two layers, update tensor by tensor", largest, (0, 1)),
):
    wanted, got = (history(algorithm, calls, reentrant) for reentrant in (False, True))
    print(f"{what}: history of the gradient {wanted}, reentrant {got}")
    bad += wanted != got
sys.exit(1 if bad else 0)
