import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling


def largest(history):
    return history.amax(dim=0)


for name, algorithm in (('"max"', "max"), ("the same as a function", largest)):
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
    expert, other = te.Linear(32, 32, bias=False), te.Linear(32, 32, bias=False)
    x = torch.ones(32, 32, device="cuda")
    for size in (16, 1, None, None, None):  # None: the expert gets no tokens
        with te.autocast(recipe=recipe):
            other(x)
            if size:
                expert(x * size)
    history = expert.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()
    print(f"amax_compute_algo {name}: the idle expert's history {history}")
