import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
mesh = init_device_mesh("cpu", (1,))
for title, weight, last in (
    ("no weight, one ignored", None, -100),
    ("weight, none ignored", torch.ones(8), 5),
    ("weight, one ignored", torch.ones(8), -100),
):
    logits = distribute_tensor(torch.ones(2, 8), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        try:
            F.cross_entropy(logits, torch.tensor([3, last]), weight=weight).backward()
            print(f"{title}: ok")
        except RuntimeError as error:
            print(f"{title}: {error}")
dist.destroy_process_group()
