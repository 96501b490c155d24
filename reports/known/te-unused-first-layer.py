"""A layer whose output reaches no loss stops the gradient scales of all others."""

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


def scale(first_is_used):
    first, second, x = layer(), layer(), tensor(1.0, grad=True)
    for _ in range(3):
        with te.autocast(recipe=recipe()):
            unused, used = first(x), second(x)
        (used + unused if first_is_used else used).backward(tensor(2.0**-10))
    return state(second, "bwd")


want, got = scale(True), scale(False)
print("gradient scale and window of the second layer after three steps")
print("first layer's output is used:  ", want)
print("first layer's output is unused:", got)
sys.exit(want[0] != got[0])
