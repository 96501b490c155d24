import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

model = te.Linear(32, 32, bias=False)
x = torch.ones(32, 32, device="cuda")
for length in (4, 8):
    try:
        with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
            y = model(x)
        y.sum().backward()
        print(f"amax_history_len={length}: ok")
    except RuntimeError as error:
        print(f"amax_history_len={length}: RuntimeError: {str(error).splitlines()[0]}")
