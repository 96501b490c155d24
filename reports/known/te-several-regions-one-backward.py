"""A sum of losses from two regions updates gradient scales twice in one backward."""

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


def run(regions):
    model, outputs = layer(), []
    if regions == 1:
        with te.autocast(recipe=recipe()):
            outputs = [model(tensor(1.0)), model(tensor(1.0))]
    else:
        for _ in range(2):
            with te.autocast(recipe=recipe()):
                outputs.append(model(tensor(1.0)))
    torch.autograd.backward(outputs, [tensor(1.0), tensor(2.0)])
    return state(model, "bwd")


want, got = run(1), run(2)
print("one backward, forwards in one region:  ", want)
print("one backward, forwards in two regions: ", got, " must hold one new maximum as well")
sys.exit(want != got)
