"""LayerNormMLP does not dequantise MXFP8 parameters outside FP8."""

import os
import sys

os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import torch

from te_on_cpu.environment import enter

enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import MXFP8BlockScaling


x, shown = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16), False
for name, make in (
    ("LayerNormLinear", lambda o: te.LayerNormLinear(32, 32, **o)),
    ("LayerNormMLP", lambda o: te.LayerNormMLP(32, 64, **o)),
):
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        layer = make({"params_dtype": torch.bfloat16, "device": "cuda"})
    try:
        layer(x)
        print(name, "runs")
    except RuntimeError as error:
        shown = True
        print(name, "must run, too, got RuntimeError:", str(error).splitlines()[0])
sys.exit(shown)
