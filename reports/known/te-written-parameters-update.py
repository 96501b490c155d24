"""1.x: writing an FP8 parameter updates the forward scales of its layer once more.
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


def history(quantised):
    torch.manual_seed(0)
    with te.fp8_model_init(enabled=quantised):
        layer = te.Linear(32, 32, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(32, 32).cuda().requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = layer(x)
    y.sum().backward()
    optimizer.step()
    return layer.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()


plain, written = history(False), history(True)
print("history of x after one step (the first cell is of now):")
print("parameters in fp32:", plain)
print("parameters in FP8: ", written)
sys.exit(1 if written != plain else 0)
