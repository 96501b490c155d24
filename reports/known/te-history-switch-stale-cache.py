"""A weight cached under one amax history stages its maxima in that history after a resize, too."""

import os
import sys

os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import torch

from te_on_cpu.environment import enter

enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


def recipe(**settings):
    return DelayedScaling(**{"amax_history_len": 4, "amax_compute_algo": "max", **settings})


def tensor(value, grad=False):
    return torch.full((32, 32), value, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def layer():
    return te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")


def staged(first):
    """Maxima of input and weight that a forward under another history leaves in the window."""
    FP8GlobalStateManager.reset()
    model, seen = layer(), []
    with te.autocast(recipe=recipe(amax_history_len=4)):
        model(tensor(1.0), is_first_microbatch=first)
    try:
        with te.autocast(recipe=recipe(amax_history_len=8)):
            model(tensor(1.0), is_first_microbatch=first)
            seen = model.fp8_meta["scaling_fwd"].amax_history[0, :2].tolist()
    except RuntimeError:
        pass  # leaving the region fails for another reason: te-history-switch-crash
    return seen


plain, cached = staged(None), staged(True)
print("staged for input and weight, not cached:", plain)
print("                              cached:    ", cached, "the weight's must not be 0")
sys.exit(plain[1] > 0 and cached[1] == 0)
