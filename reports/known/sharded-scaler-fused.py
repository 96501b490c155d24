"""torch, ShardedGradScaler: with a fused optimizer one rank steps and the other, which has the infinity, skips."""
import os, sys, tempfile
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

torch.set_num_threads(1)
store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)


def step(fused):
    """(a parameter, the scale) of each rank after a step of Adam with a learning rate of 1; the second rank's
    gradient has an infinity."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.tensor([1.0, 1.0, 1.0, float("inf") if rank else 1.0])
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    scaler.step(torch.optim.Adam([parameter], lr=1.0, fused=fused))
    scaler.update()
    got = torch.tensor([parameter[0].item(), scaler.get_scale()])
    every = [torch.empty(2) for _ in range(2)]
    dist.all_gather(every, got)
    return [(round(value, 1), scale) for value, scale in (one.tolist() for one in every)]


right, got = step(False), step(True)
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
print("parameter and scale on both ranks, fused=False:", right)
print("fused=True:", got)
skipped = (1.0, 512.0)
if right != [skipped, skipped]:
    print("cannot tell: the other implementation does not skip either")
    sys.exit(125)
sys.exit(got != right)
