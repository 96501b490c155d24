"""torch, loss_parallel: a rank that has no class raises, and the others wait for it."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())  # collectives do nothing
mesh = init_device_mesh("cpu", (4,))


def loss(classes):
    """The last of four ranks has what the others leave: of 10 classes one, of 9 none."""
    each = -(-classes // 4)
    here = max(classes - 3 * each, 0)
    logits = DTensor.from_local(torch.ones(2, here), mesh, [Shard(1)], shape=(2, classes), stride=(classes, 1))
    with loss_parallel():
        try:
            F.cross_entropy(logits, torch.tensor([3, 5]))
        except RuntimeError as error:
            return str(error)
    return "a loss"


found = {classes: loss(classes) for classes in (8, 10, 9)}
dist.destroy_process_group()
for classes, what in found.items():
    print(f"{classes} classes over four ranks: {what}")
sys.exit(found[8] == found[10] == "a loss" and "out of bounds for dimension 1 with size 0" in found[9])
