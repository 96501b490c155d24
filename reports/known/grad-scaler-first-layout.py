"""torch, GradScaler on DTensors: with a replicated gradient first, one rank steps and the other skips."""
import os, sys, tempfile
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

torch.set_num_threads(1)
store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
mesh = init_device_mesh("cpu", (2,))


def parameter(placement, grad):
    made = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))
    made.grad = distribute_tensor(torch.tensor(grad), mesh, [placement])
    return made


def step(replicated_first):
    """(the replicated parameter, the scale) of each rank after a step of SGD with a learning rate of 1024; the
    second rank's half of the sharded gradient has an infinity."""
    norm = parameter(Replicate(), [1.0, 1.0, 1.0, 1.0])
    weight = parameter(Shard(0), [1.0, 1.0, 1.0, float("inf")])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    scaler.step(torch.optim.SGD([norm, weight] if replicated_first else [weight, norm], lr=1024.0))
    scaler.update()
    got = torch.tensor([norm.to_local()[0].item(), scaler.get_scale()])
    every = [torch.empty(2) for _ in range(2)]
    dist.all_gather(every, got)
    return [tuple(one.tolist()) for one in every]


right, got = step(False), step(True)
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
print("parameter and scale on both ranks, sharded gradient first:", right)
print("replicated gradient first:", got)
skipped = (1.0, 512.0)
if right != [skipped, skipped]:
    print("cannot tell: the other order does not skip either")
    sys.exit(125)
sys.exit(got != right)
