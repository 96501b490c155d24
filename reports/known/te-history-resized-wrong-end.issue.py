import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling


def forward(layer, size, length):
    with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
        layer(torch.full((32, 32), float(size), device="cuda"))


layer = te.Linear(32, 32, bias=False)
for size in (1, 2, 3, 4, 5):
    forward(layer, size, 4)
print("amax history of the input:", layer.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist())
layer.adjust_amax_history_length(3)
print("cut to 3 cells:           ", layer.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist())
