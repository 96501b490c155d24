"""torch, loss_parallel: with weights of classes, the backward of an ignored target raises."""
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


def trained(logits, targets, weight):
    """The loss, or what its backward raised."""
    loss = F.cross_entropy(logits.requires_grad_(), targets, weight=weight)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "a gradient"


def shared(targets, weight):
    with loss_parallel():
        return trained(distribute_tensor(torch.ones(2, 8), mesh, [Shard(1)]), targets, weight)


targets, ignored, weight = torch.tensor([3, 5]), torch.tensor([3, -100]), torch.ones(8)
plain = trained(torch.ones(2, 8), ignored, weight)
others = {shared(targets, weight), shared(ignored, None)}
raised = shared(ignored, weight)
dist.destroy_process_group()
print("cross_entropy of weighted classes, a target ignored:", plain)
print("in loss_parallel, without either:", *others)
print("in loss_parallel:", raised)
sys.exit(plain == "a gradient" and others == {"a gradient"} and "index -100 is out of bounds" in raised)
