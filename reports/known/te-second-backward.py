"""TransformerEngine: backward(retain_graph=True) frees what a second backward needs.
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
bad = 0
for layer in (torch.nn.Linear(32, 32, device="cuda"), te.Linear(32, 32), te.LayerNormLinear(32, 32)):
    x = torch.randn(32, 32).cuda().requires_grad_()
    y = layer(x)  # in high precision: FP8 has nothing to do with it
    y.sum().backward(retain_graph=True)
    try:
        y.sum().backward()
        print(type(layer).__name__, "runs backward twice, as asked")
    except Exception as error:
        bad += 1
        print(f"{type(layer).__name__}: {type(error).__name__}: {str(error)[:90]}")
sys.exit(1 if bad else 0)
