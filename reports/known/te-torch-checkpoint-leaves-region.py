"""torch's checkpoint of a TransformerEngine layer: what ran in FP8 is recomputed in high precision.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import quantization

torch.manual_seed(0)
recipe = DelayedScaling(amax_history_len=4)
bad = 0
for name, by in (("te.checkpoint", te.checkpoint), ("torch, reentrant", checkpoint), ("torch", checkpoint)):
    layer, runs = te.Linear(32, 32, bias=False), []

    def block(x):
        runs.append(quantization.FP8GlobalStateManager.is_fp8_enabled())
        return layer(x)

    try:
        for _ in range(2):
            x = torch.randn(32, 32).cuda().requires_grad_()
            with te.autocast(enabled=True, recipe=recipe):
                y = by(block, x, use_reentrant=name != "torch")
            y.sum().backward()
    except Exception as error:
        print(f"{name}: {type(error).__name__}:", str(error).splitlines()[0][:90])
        bad += 1
        continue
    scale = layer.fp8_meta["scaling_bwd"].scale[0].item()
    print(f"{name}: in FP8 forward {runs[0]}, recompute {runs[1]}; scale of gradients {scale:.6g}")
    bad += runs[0] != runs[1] or scale == 1.0
sys.exit(1 if bad else 0)
