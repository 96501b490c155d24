"""On one rank the optimizer refuses a sharded weight without elements; in one process it steps."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))


def train(model, optimizer, features):
    model(torch.randn(4, features)).sum().backward()
    optimizer(model.parameters(), lr=0.1).step()


bad = 0
for style, features, out in ((ColwiseParallel, 3, 0), (RowwiseParallel, 0, 3), (ColwiseParallel, 3, 1)):
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        train(nn.Linear(features, out, bias=False), optimizer, features)
        model = parallelize_module(nn.Linear(features, out, bias=False), mesh, style())
        try:
            train(model, optimizer, features)
            told = "ok"
        except RuntimeError as error:
            told = str(error).partition(". ")[0]
            bad += "require placement changes" in told
        gradient = model.weight.grad.placements
        print(
            f"nn.Linear({features}, {out}) under {style.__name__}, {optimizer.__name__}: weight "
            f"{model.weight.placements}, gradient {gradient}: {told}"
        )
sys.exit(bool(bad))
