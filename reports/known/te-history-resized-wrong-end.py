"""Shortening the amax history drops the newest maxima."""

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


model = layer()
for value in (1.0, 2.0, 100.0):
    with te.autocast(recipe=recipe()):
        model(tensor(value))
os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
loaded = layer()
loaded.load_state_dict(model.state_dict())
with torch.no_grad(), te.autocast(recipe=recipe(amax_history_len=3)):
    loaded(tensor(0.0))
print("history 4:", state(model)[1])
print("history 3:", state(loaded)[1], "must be [0.0, 2.0, 100.0]")
sys.exit(state(loaded)[1] != [0.0, 2.0, 100.0])
