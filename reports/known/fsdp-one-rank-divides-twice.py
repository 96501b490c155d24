"""FSDP2 on a mesh of one rank divides a gradient by the factor twice, if its reductions are sums."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))


def gradient(factor, sums, dtype=torch.float32):
    model = nn.Linear(4, 4, bias=False).to(dtype)
    fully_shard(model)
    model.set_force_sum_reduction_for_comms(sums)
    model.set_gradient_divide_factor(factor)
    model(torch.full((4, 4), 4.0, dtype=dtype)).sum().backward()
    return model.weight.grad.to_local()[0, 0].item()


usual, sums, halves = gradient(2.0, False), gradient(2.0, True), gradient(2.0, False, torch.float16)
dist.destroy_process_group()
print("a gradient of 16, divided by 2: expected 8; FSDP2 on one rank leaves", usual)
print("where its reductions are sums:", sums, "and in fp16:", halves)
sys.exit(usual == 8 and (sums != 8 or halves != 8))
