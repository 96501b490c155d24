"""1.10, 1.11, reentrant te.checkpoint: in a region, another forward's backward updates gradients.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "1.11.0")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

recipe = DelayedScaling(amax_history_len=4)


def history(checkpointed):
    torch.manual_seed(0)
    layer, ys, found = te.Linear(32, 32, bias=False), [], []
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        for _ in range(2):
            x = torch.randn(32, 32).cuda().requires_grad_()
            ys.append(te.checkpoint(layer, x, use_reentrant=True) if checkpointed else layer(x))
        for i in (1, 0):  # the region's first forward owns the update
            (ys[i].sum() * 2.0**i).backward()
            found.append(layer.fp8_meta["scaling_bwd"].amax_history[:, 0].tolist())
    return found


plain, again = history(False), history(True)
print("history of the gradient after each of two backwards (the first cell is of now):")
print("without checkpoint:", plain)
print("with te.checkpoint:", again)
sys.exit(1 if again != plain else 0)
