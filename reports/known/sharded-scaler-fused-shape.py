"""torch, ShardedGradScaler: after unscale_ the step of a fused Adam raises, as found_inf has the shape [1]."""
import os, sys, tempfile
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))


def step(kind, unscales):
    """What a step on finite gradients comes to."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    scaler = kind("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.Adam([parameter], fused=True)
    if unscales:
        scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)
    return "a step"


kinds = torch.amp.GradScaler, ShardedGradScaler
found = {(kind.__name__, unscales): step(kind, unscales) for kind in kinds for unscales in (False, True)}
dist.destroy_process_group()
for (name, unscales), what in found.items():
    print(f"{name}, {'after unscale_' if unscales else 'by itself'}: {what}")
raised = found.pop(("ShardedGradScaler", True))
sys.exit(set(found.values()) == {"a step"} and "doesn't match the broadcast shape" in raised)
