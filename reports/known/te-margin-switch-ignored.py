"""A layer keeps the margin of its first forward."""

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


def scale(*margins):
    model = layer()
    for margin in margins:
        with te.autocast(recipe=recipe(margin=margin)):
            model(tensor(1.0))
    return state(model)[0]


want, got = scale(3, 3), scale(0, 3)
print("scale after two steps with margin 3:               ", want)
print("scale after one step with margin 0, one with 3:    ", got, " must be", want)
sys.exit(want != got)
