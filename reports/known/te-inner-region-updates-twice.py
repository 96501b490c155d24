"""An inner region makes its outer one update gradient scales twice."""

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


def run(nested):
    model = layer()
    with te.autocast(recipe=recipe()):
        if nested:
            with te.autocast(recipe=recipe()):
                first = model(tensor(1.0))
        else:
            first = model(tensor(1.0))
        second = model(tensor(1.0))
    first.backward(tensor(1.0))
    second.backward(tensor(2.0))
    return state(model, "bwd")


want, got = run(False), run(True)
print("two microbatches in one region:                     ", want)
print("the same, the first one in a region inside it:      ", got)
sys.exit(want != got)
