"""The optimizer refuses a sharded weight with fewer features than ranks; in one process it steps."""
import os, sys, tempfile
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
ONE, TWO = DeviceMesh("cpu", [rank]), init_device_mesh("cpu", (2,))
WHOLE = {RowwiseParallel: {"input_layouts": Replicate()}, ColwiseParallel: {"output_layouts": Replicate()}}


def train(model, optimizer, features):
    model(torch.randn(4, features)).sum().backward()
    optimizer(model.parameters(), lr=0.1).step()


bad, lines = 0, []
for style, features, out, mesh in (
    (ColwiseParallel, 3, 0, ONE), (RowwiseParallel, 0, 3, ONE), (ColwiseParallel, 3, 1, ONE),
    (ColwiseParallel, 3, 1, TWO), (RowwiseParallel, 1, 3, TWO), (ColwiseParallel, 3, 2, TWO),
):
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        train(nn.Linear(features, out, bias=False), optimizer, features)
        model = parallelize_module(nn.Linear(features, out, bias=False), mesh, style(**WHOLE[style]))
        try:
            train(model, optimizer, features)
            told = "ok"
        except RuntimeError as error:
            told = str(error).partition(". ")[0]
            bad += "require placement changes" in told
        lines.append(
            f"nn.Linear({features}, {out}) under {style.__name__} on {mesh.size()}, {optimizer.__name__}: weight "
            f"{model.weight.placements}, gradient {model.weight.grad.placements}: {told}"
        )
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
print("\n".join(lines))
sys.exit(bool(bad))
