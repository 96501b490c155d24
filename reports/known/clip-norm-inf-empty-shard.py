"""torch, clip_grad_norm_ by the largest gradient: a rank whose shard is empty raises, the others wait for it."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())  # collectives do nothing
mesh = init_device_mesh("cpu", (2,))


def clipped(rows, order):
    """The second of two ranks has half of two rows, and none of one, as FSDP2 shards them."""
    here = torch.ones(rows // 2, 4)
    shape = {"shape": (rows, 4), "stride": (4, 1)}
    parameter = torch.nn.Parameter(DTensor.from_local(here, mesh, [Shard(0)], **shape))
    parameter.grad = DTensor.from_local(here.clone(), mesh, [Shard(0)], **shape)
    try:
        torch.nn.utils.clip_grad_norm_([parameter], 1.0, norm_type=order)
    except RuntimeError as error:
        return str(error)
    return "clipped"


found = {(rows, order): clipped(rows, order) for rows in (2, 1) for order in (2.0, torch.inf)}
dist.destroy_process_group()
for (rows, order), what in found.items():
    print(f"{rows} rows over two ranks, norm_type {order}: {what}")
error = found.pop((1, torch.inf))
sys.exit(set(found.values()) == {"clipped"} and "infinity norm on an empty tensor" in error)
