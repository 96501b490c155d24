"""Selective checkpointing around modules that fully_shard shards one by one: the backward raises."""
import os, sys, tempfile
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from functools import partial
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

torch.set_num_threads(1)
store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
ONE, TWO = DeviceMesh("cpu", [rank]), init_device_mesh("cpu", (2,))


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


FULL = partial(checkpoint, use_reentrant=False)
SELECTIVE = partial(FULL, context_fn=lambda: create_selective_checkpoint_contexts(policy))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def attempt(checkpointed, blocks, mesh):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(blocks))), torch.randn(4, 8, requires_grad=True)
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)] + [model]:
        mesh is None or fully_shard(module, mesh=mesh)
    try:
        checkpointed(model, x).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return "ok"


bad, lines = 0, []
for name, checkpointed in (("full", FULL), ("selective", SELECTIVE)):
    for blocks, mesh in ((2, None), (1, ONE), (2, ONE), (2, TWO), (5, TWO)):
        got = attempt(checkpointed, blocks, mesh)
        lines.append(f"{name} checkpointing, {blocks} blocks, {'not sharded' if mesh is None else f'on {mesh.size()}'}: {got}")
        bad += mesh is not None and name == "selective" and "not found in storage" in got
if rank:
    os._exit(0)
os.wait()
print("\n".join(lines))
sys.exit(bool(bad))
