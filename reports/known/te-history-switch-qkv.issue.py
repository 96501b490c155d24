import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

q = {"query": 32, "key": 32, "value": 32}
model = te.LayerNormLinear(32, 96, parameters_split=q, params_dtype=torch.bfloat16)
x = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16)
for length in (4, 8):
    try:
        with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
            try:
                model(x)
                print(f"amax_history_len={length}: the forward runs")
            except ValueError as error:
                print(f"amax_history_len={length}: ValueError: {error}")
    except RuntimeError:
        pass  # leaving the region raises, too: another bug of the same function
