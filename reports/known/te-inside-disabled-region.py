"""Forward scales stay at 1 in a region inside a disabled one."""

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


def run(around):
    model = layer()
    for _ in range(3):
        with te.autocast(enabled=not around, recipe=recipe()), te.autocast(recipe=recipe()):
            y = model(tensor(2.0**-12))
        y.backward(tensor(1.0))
    return state(model)


want, got = run(False), run(True)
print("three steps in an enabled region:                 ", want)
print("the same inside autocast(enabled=False):          ", got)
sys.exit(want != got)
