"""Another model's amax algorithm updates this one."""

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


def scale(other):
    """Gradient scale of a model with "max" after a large and a small gradient."""
    model, guest = layer(), layer()
    for gradient in (100.0, 1.0):
        with te.autocast(recipe=recipe()):
            y = model(tensor(1.0))
        with te.autocast(recipe=recipe(amax_compute_algo=other)):
            guest(tensor(1.0))
        y.backward(tensor(gradient))
    return state(model, "bwd")[0]


want, got = scale("max"), scale("most_recent")
print("beside a model with 'max':         ", want)
print("beside a model with 'most_recent': ", got, " must be", want)
sys.exit(want != got)
