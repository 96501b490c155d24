"""An evaluation under no_grad changes the scales of the training step after it."""

import os
import sys

os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import torch

from te_on_cpu.environment import enter

enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling


def recipe(**settings):
    return DelayedScaling(**{"amax_history_len": 4, "amax_compute_algo": "max", **settings})


def tensor(value, grad=False):
    return torch.full((32, 32), value, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def layer():
    return te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")


def state(module, direction="fwd"):
    """Scale and window of the first slot: the input's, or the output gradient's."""
    meta = module.fp8_meta[f"scaling_{direction}"]
    return meta.scale[0].item(), meta.amax_history[:, 0].tolist()


def run(evaluate):
    model = layer()
    if evaluate:
        model.eval()
        with torch.no_grad(), te.autocast(recipe=recipe()):
            model(tensor(100.0))
        model.train()
    with te.autocast(recipe=recipe()):
        model(tensor(1.0)).backward(tensor(1.0))
    return state(model)


want, got = run(False), run(True)
print("after one training step:            ", want)
print("after an evaluation and that step:  ", got)
sys.exit(want != got)
