"""torch.compile of DistributedDataParallel raises where bucket_cap_mb is below 1."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))


def compiled(megabytes):
    """A row of ones through a compiled model whose buckets are so large, or what it raises."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False), bucket_cap_mb=megabytes)
    nn.init.ones_(model.module.weight)
    torch.compiler.reset()
    try:
        return torch.compile(model, backend="eager")(torch.ones(1, 4)).item()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


large, small = compiled(1), compiled(0.5)
dist.destroy_process_group()
print("a row of ones through weights of one: expected 4; with buckets of 1 MB", large)
print("with buckets of 0.5 MB:", small)
sys.stdout.flush()
os._exit(large == 4 and small != 4)
