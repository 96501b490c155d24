"""Adam's first step after get_state_dict is smaller than without: it is taken for the second."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

torch.set_num_threads(1)


def update(saves):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)
    before = model.weight.detach().clone()
    if saves:
        get_state_dict(model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return (before - model.weight.detach()).mean().item()


plain, after_saving = update(False), update(True)
print(f"AdamW's first update at a learning rate of 0.5: expected {plain:.4f}, after get_state_dict got {after_saving:.4f}")
sys.exit(abs(plain - after_saving) > 0.01)
