"""Scaling state of deleted models is never freed."""

import gc
import os
import sys
import weakref

os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import torch

from te_on_cpu.environment import enter

enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling


windows = []
for _ in range(3):
    model = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        model(torch.ones(32, 32, device="cuda", dtype=torch.bfloat16))
    windows.append(weakref.ref(model.fp8_meta["scaling_fwd"].amax_history))
    del model
gc.collect()
alive = sum(window() is not None for window in windows)
print("three models were built, run and deleted; windows still held:", alive, "must be 0")
sys.exit(alive > 0)
