"""te.checkpoint: backward inside a region makes the region's next forward update gradients, too.
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


def history(checkpointed):
    torch.manual_seed(0)
    layer = te.Linear(32, 32, bias=False)
    with te.autocast(enabled=True, recipe=recipe):
        for microbatch in range(3):
            x = torch.randn(32, 32).cuda().requires_grad_()
            y = te.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            (y.sum() * 2.0**microbatch).backward()
    return layer.fp8_meta["scaling_bwd"].amax_history[:, 0].tolist()


plain, again = history(False), history(True)
print("three microbatches in one region, history of the gradient (the first cell is of now):")
print("without checkpoint:", plain)
print("with te.checkpoint:", again)
sys.exit(1 if again != plain else 0)
