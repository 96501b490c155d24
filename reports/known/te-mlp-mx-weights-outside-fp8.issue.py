import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import MXFP8BlockScaling

x = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16)
layers = {"Linear": (32, 32), "LayerNormLinear": (32, 32), "LayerNormMLP": (32, 64)}
for name, sizes in layers.items():
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        layer = getattr(te, name)(*sizes, params_dtype=torch.bfloat16, device="cuda")
    try:
        with torch.no_grad():
            layer(x)  # an evaluation in high precision
        print(f"{name}: ok")
    except Exception as error:
        print(f"{name}: {type(error).__name__}")
