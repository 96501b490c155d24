"""DistributedDataParallel with static_graph=True, whose first backward is inside of no_sync, raises."""
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


def accumulates(**options):
    """The gradient of two microbatches of ones, or what they raise."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False), **options)
    try:
        with model.no_sync():
            model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
    except (RuntimeError, SystemError) as error:
        return f"{type(error).__name__}: {error.__cause__ or error}"[:100]
    return model.module.weight.grad.flatten().tolist()


plain, static = accumulates(), accumulates(static_graph=True)
dist.destroy_process_group()
print("gradients of two microbatches of ones, the first in no_sync: expected 2; DDP leaves", plain)
print("with static_graph=True:", static)
sys.stdout.flush()
os._exit(plain == [2.0] * 4 and static != [2.0] * 4)
