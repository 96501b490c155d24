"""te.checkpoint: an evaluation in high precision before backward turns the recompute into a forward.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

recipe = DelayedScaling(amax_history_len=4)
bad = 0
for clean_steps in (0, 1):
    torch.manual_seed(0)
    layer = te.Linear(32, 32, bias=False)
    for step in range(clean_steps + 1):
        x = torch.randn(32, 32).mul(8**step).cuda().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            y = te.checkpoint(layer, x, use_reentrant=False)
        before = layer.fp8_meta["scaling_fwd"].scale[0].item()
        if step == clean_steps:
            with torch.no_grad():
                layer(x)  # outside every region
        try:
            y.sum().backward()
            after = layer.fp8_meta["scaling_fwd"].scale[0].item()
        except KeyError as error:
            after = f"KeyError {error}"
    print(f"after {clean_steps} clean steps: scale of x before backward {before:.6g}, after it {after}")
    bad += after != before
sys.exit(1 if bad else 0)
