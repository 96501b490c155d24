import os, tempfile, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
model = torch.nn.Linear(4, 1)  # one row: the second rank's shards are empty
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
model(torch.ones(2, 4)).sum().backward()
for order in (2.0, torch.inf):
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=order)
        found = norm.full_tensor().item()
    except RuntimeError as error:
        found = str(error)
    if rank == 1:
        print(f"rank 1, norm_type {order}: {found}", flush=True)
