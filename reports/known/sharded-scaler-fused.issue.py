import os, tempfile, torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
cases = ("SGD", False, [1]), ("SGD", True, [0, 1]), ("Adam", True, [1])
for kind, unscales, infinite in cases:
    parameter = torch.nn.Parameter(torch.ones(1))  # this rank's shard
    parameter.grad = torch.full((1,), torch.inf if rank in infinite else 1024.0)
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.5, fused=True)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    try:
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        seen = parameter.item()
    except RuntimeError as error:
        seen = str(error)
    if rank == 0:
        print(f"{kind}, {unscales=}, infinities on ranks {infinite}: rank 0 has {seen}")
dist.destroy_process_group()
