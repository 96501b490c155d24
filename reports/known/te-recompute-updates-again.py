"""te.checkpoint with the update tensor by tensor: each recompute moves the forward scales once more.
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


recipe = DelayedScaling(amax_history_len=8, amax_compute_algo=largest)


def scale(checkpointed):
    torch.manual_seed(0)
    layer = te.Linear(32, 32, bias=False)
    for step in range(6):
        x = torch.randn(32, 32).mul(10 if step == 0 else 1).cuda().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            y = te.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        y.sum().backward()
    return layer.fp8_meta["scaling_fwd"].scale[0].item()


plain, again = scale(False), scale(True)
print(f"history of 8, spike 6 steps ago: scale of x {plain:.6g} without checkpoint, {again:.6g} with it")
sys.exit(1 if again != plain else 0)
