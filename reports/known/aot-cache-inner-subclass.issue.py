import os, tempfile

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # a later process fails as well
import torch
import torch.distributed as dist
import torchao.optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
for kind in ("AdamW8bit", "AdamWFp8"):
    torch._dynamo.reset()
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = getattr(torchao.optim, kind)(model.parameters())  # states: DTensors of subclasses
    model(torch.ones(1, 64)).sum().backward()
    try:
        optimizer.step()
        print(f"{kind}: a step")
    except AttributeError as error:
        print(f"{kind}: {error}")
dist.destroy_process_group()
