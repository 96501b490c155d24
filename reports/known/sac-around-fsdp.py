"""Selective checkpointing around modules that fully_shard shards one by one: the backward of residual blocks raises.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from functools import partial
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def policy(ctx, op, *args, **kwargs):
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


FULL = partial(checkpoint, use_reentrant=False)
SELECTIVE = partial(FULL, context_fn=lambda: create_selective_checkpoint_contexts(policy))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def attempt(checkpointed, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if sharded:
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                fully_shard(module)
        fully_shard(model)
    x = torch.randn(4, 8, requires_grad=True)
    try:
        checkpointed(model, x).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return "ok"


bad = 0
for name, checkpointed in (("full", FULL), ("selective", SELECTIVE)):
    for sharded in (False, True):
        got = attempt(checkpointed, sharded)
        print(f"{name} checkpointing, sharded={sharded}: {got}")
        bad += sharded and name == "selective" and "not found in storage" in got
sys.exit(bool(bad))
