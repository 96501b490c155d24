import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="max")
for length in (5, 4):  # the other model's history
    other = DelayedScaling(amax_history_len=length, amax_compute_algo="most_recent")
    a, b = te.Linear(32, 32, bias=False), te.Linear(32, 32, bias=False)
    x = torch.ones(32, 32, device="cuda", requires_grad=True)
    for size in (16.0, 1.0, 1.0):
        with te.autocast(recipe=recipe):
            ya = a(x)
        with te.autocast(recipe=other):
            yb = b(x)
        torch.autograd.backward([ya, yb], [torch.full_like(ya, size), torch.ones_like(yb)])
    scale = a.fp8_meta["scaling_bwd"].scale[0].item()
    print(f"b has amax_history_len={length}: gradient scale of a, whose maximum is 16: {scale:g}")
