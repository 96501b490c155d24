"""torch, fused optimizers: a step is skipped if found_inf is 1, and taken if it is 2, as with infinities on two ranks."""
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


def step(fused, infinite):
    """The first rank's parameter after a step of SGD where these ranks have an infinite gradient."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1024.0, float("inf") if rank in infinite else 1024.0])
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return parameter.tolist()


every = (False, (1,)), (False, (0, 1)), (True, (1,)), (True, (0, 1))
found = {how: step(*how) for how in every}
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
for (fused, infinite), parameter in found.items():
    print(f"fused={fused}, infinities on {len(infinite)} of 2 ranks: parameter {parameter}")
got = found.pop((True, (0, 1)))
if set(map(tuple, found.values())) != {(1.0, 1.0)}:
    print("cannot tell: other steps are not skipped either")
    sys.exit(125)
sys.exit(got != [1.0, 1.0])
