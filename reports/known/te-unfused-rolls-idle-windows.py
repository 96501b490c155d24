"""An update without the bulk kernel rolls the windows of layers that did not run."""

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


def run(unfused):
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = str(int(unfused))
    idle, busy = layer(), layer()
    for value in (100.0, 1.0):
        with te.autocast(recipe=recipe()):
            idle(tensor(value))
    before = state(idle)
    for _ in range(2):
        with te.autocast(recipe=recipe()):
            busy(tensor(1.0))
    return before, state(idle)


shown = False
for unfused in (False, True):
    before, after = run(unfused)
    print("unfused" if unfused else "bulk   ", "idle layer before", before, "after others ran", after)
    shown |= before != after
sys.exit(shown)
