"""A region opened inside a reentrant te.checkpoint: forward scales stay at 1 for ever.
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


def scales(reentrant):
    torch.manual_seed(0)
    layer = te.Linear(32, 32, bias=False)
    with torch.no_grad():
        layer.weight.mul_(2.0**-10)  # E4M3's smallest normal value is 2^-6

    def block(x):
        with te.autocast(enabled=True, recipe=recipe):
            return layer(x)

    for _ in range(4):
        x = torch.randn(32, 32).cuda().requires_grad_()
        y = te.checkpoint(block, x, use_reentrant=reentrant)
        y.sum().backward()
    far = ((y - x @ layer.weight.T).norm() / (x @ layer.weight.T).norm()).item()
    return layer.fp8_meta["scaling_fwd"].scale[:2].tolist(), far


for reentrant in (False, True):
    found, far = scales(reentrant)
    print(f"reentrant={reentrant}: scales of x and weight {found} after 4 steps, output off by {far:.3g}")
sys.exit(1 if found == [1.0, 1.0] else 0)
