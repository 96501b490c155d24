"""fully_shard: a parameter without elements kills the backward; one process trains such a model.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def attempt(k, n, sharded):
    model = nn.Sequential(nn.Linear(k, n))
    if sharded:
        fully_shard(model)
    y = model(torch.randn(4, k))
    try:
        y.backward(torch.ones_like(y))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return "ok"


bad = 0
for k, n in ((0, 8), (8, 0), (8, 8)):
    alone, sharded = attempt(k, n, False), attempt(k, n, True)
    print(f"nn.Linear({k}, {n}): backward alone: {alone}; under fully_shard: {sharded}")
    bad += alone == "ok" and "non-empty tensor" in sharded
sys.exit(bool(bad))
