"""te.checkpoint of 1.x: a region opened inside is an outermost one when recomputed, and updates again.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "1.12.0")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling


def largest(history):
    return history.amax(dim=0)


recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=largest)


def history(checkpointed):
    torch.manual_seed(0)
    layer = te.Linear(32, 32, bias=False)

    def block(x):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return layer(x)

    x = torch.randn(32, 32).cuda().requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = te.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    y.sum().backward()
    return layer.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()


plain, again = history(False), history(True)
print("history of x after one step (the first cell is of now):")
print("without checkpoint:", plain)
print("with te.checkpoint:", again)
sys.exit(1 if again != plain else 0)
