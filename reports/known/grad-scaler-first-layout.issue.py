import os, tempfile, torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
mesh = init_device_mesh("cpu", (2,))
kinds = ("replicated", Replicate(), 1.0), ("sharded", Shard(0), torch.inf)
for first in ("sharded", "replicated"):
    parameters = {}
    for name, placement, last in kinds:
        parameters[name] = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))
        grad = torch.tensor([1.0, 1.0, 1.0, last])  # the infinity is in the second rank's shard
        parameters[name].grad = distribute_tensor(grad, mesh, [placement])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    order = sorted(parameters, key=lambda name: name != first)
    scaler.step(torch.optim.SGD([parameters[name] for name in order], lr=1024.0))
    scaler.update()
    seen = parameters["replicated"].to_local()[0].item(), scaler.get_scale()
    dist.all_gather_object(every := [None, None], seen)
    if rank == 0:
        print(f"{first} gradient first: parameter and scale on both ranks {every}")
dist.destroy_process_group()
