"""A forward outside FP8 before saving loses all scales."""

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


def loaded(validate):
    model = layer()
    with te.autocast(recipe=recipe()):
        y = model(tensor(100.0))
    y.backward(tensor(1.0))
    if validate:
        with torch.no_grad():
            model(tensor(1.0))
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    other = layer()
    other.load_state_dict(model.state_dict())
    with torch.no_grad(), te.autocast(recipe=recipe()):
        other(tensor(0.0))
    return state(other)


want, got = loaded(False), loaded(True)
print("loaded scale and window, saved after an FP8 step:          ", want)
print("the same, with a validation in bf16 between step and save: ", got)
sys.exit(want != got)
