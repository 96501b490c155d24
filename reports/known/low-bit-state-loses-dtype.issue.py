import torch
import torch.distributed as dist
import torchao.optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
for stance in ("default", "force_eager"):
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    optimizer = torchao.optim.AdamW8bit(model.parameters())
    model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    try:
        with torch.compiler.set_stance(stance):
            optimizer.step()
        print(f"{stance}: a step")
    except Exception as error:
        print(f"{stance}: {str(error).splitlines()[0][:96]}")
dist.destroy_process_group()
