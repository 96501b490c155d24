"""torchao, AdamW8bit, AdamW4bit and AdamWFp8: a step of bf16 parameters that are DTensors raises."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
import torchao.optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))


def step(kind, dtype, sharded):
    """What a step comes to, without torch.compile (with it another error is raised)."""
    model = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = getattr(torchao.optim, kind)(model.parameters())
    model(torch.ones(1, 64, dtype=dtype)).sum().backward()
    try:
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "a step"


found = {}
for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
    for dtype in (torch.float32, torch.bfloat16):
        for sharded in (False, True):
            found[kind, dtype, sharded] = what = step(kind, dtype, sharded)
            print(f"{kind}, {dtype}, {'FSDP2' if sharded else 'one process'}: {what}")
dist.destroy_process_group()
wrong = {case for case, what in found.items() if "expected dtype torch.bfloat16" in what}
if wrong | {case for case, what in found.items() if what == "a step"} != {*found}:
    print("cannot tell: another error")
    sys.exit(125)
sys.exit(bool(wrong))
