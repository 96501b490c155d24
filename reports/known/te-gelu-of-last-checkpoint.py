"""te.checkpoint(use_reentrant=False) changes the GELU of every other LayerNormMLP of the process.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te

torch.manual_seed(0)
other, model = te.Linear(64, 64), te.LayerNormMLP(64, 256)
x = torch.randn(64, 64).mul(8).cuda()
before = model(x)
te.checkpoint(other, x.clone().requires_grad_(), use_reentrant=False)  # has nothing to do with it
after = model(x)
far = (after - before).abs().max().item()
print(f"fused bias and GELU: {model.bias_gelu_nvfusion}; output changed by {far:.3g} at most, must be 0")
sys.exit(1 if far else 0)
