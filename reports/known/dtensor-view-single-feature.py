"""On one rank a linear with one feature, or none, dies under tensor parallelism; alone it runs."""
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


def attempt(tokens, features):
    model = parallelize_module(nn.Linear(features, 8), mesh, RowwiseParallel())
    try:
        model(torch.randn(2, tokens, features))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return "ok"


bad = 0
for tokens, features in ((1, 1), (4, 1), (1, 2), (1, 0), (4, 0)):
    nn.Linear(features, 8)(torch.randn(2, tokens, features))
    told = attempt(tokens, features)
    print(f"nn.Linear({features}, 8) of [2, {tokens}, {features}] under RowwiseParallel: {told}")
    bad += "remove or reshape sharded dimension" in told
for features, bias in ((1, True), (1, False), (2, True)):
    x = torch.randn(4, 3)
    nn.Linear(3, features, bias=bias)(x).sum().backward()
    model = parallelize_module(nn.Linear(3, features, bias=bias), mesh, ColwiseParallel())
    try:
        model(x).sum().backward()
        told = "ok"
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    print(f"backward of nn.Linear(3, {features}, bias={bias}) under ColwiseParallel: {told}")
    bad += "remove or reshape sharded dimension" in told
sys.exit(bool(bad))
