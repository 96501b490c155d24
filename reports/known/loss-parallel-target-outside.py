"""torch, loss_parallel: a target that is no class counts as a row of loss 0, and no error is raised."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import tempfile
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
mesh = init_device_mesh("cpu", (1,))


def plain(last):
    try:
        return F.cross_entropy(torch.zeros(2, 8), torch.tensor([3, last])).item()
    except IndexError as error:
        return str(error)


def shared(last):
    logits = distribute_tensor(torch.zeros(2, 8), mesh, [Shard(1)])
    with loss_parallel():
        try:
            return F.cross_entropy(logits, torch.tensor([3, last])).full_tensor().item()
        except (IndexError, RuntimeError) as error:
            return str(error)


right, refused = plain(5), plain(8)
same, got = shared(5), shared(8)
dist.destroy_process_group()
print("cross_entropy of 8 equal classes, targets 3 and 5:", right, "; in loss_parallel:", same)
print("targets 3 and 8:", refused, "; in loss_parallel:", got)
sys.exit(refused == "Target 8 is out of bounds." and same == right and got == right / 2)
