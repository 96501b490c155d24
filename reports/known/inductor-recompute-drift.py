"""Compiled, selectively checkpointed blocks multiply other FP8 codes in recompute than in forward."""

import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
from functools import partial as bind

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts as contexts)
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

torch.set_num_threads(1), torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w2, self.w3 = (nn.Linear(d, d, bias=False) for _ in range(3))

    def forward(self, x):
        y = self.n1(x)
        q, k, v = (w(y).unflatten(-1, (2, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(y.flatten(2))
        y = self.n2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._scaled_mm:
            again = torch._C._current_graph_task_id() != -1
            seen[again].append([t.detach().float().clone() for t in (args[1].t(), args[0])])
        return func(*args, **(kwargs or {}))

def watched(self, inputs, call=CompiledFxGraph.__call__):
    with Watch():
        return call(self, inputs)

def policy(ctx, op, *args, **kwargs):  # attention is kept, all else is computed again
    kept = op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CompiledFxGraph.__call__, seen = watched, ([], [])
config = Float8LinearConfig.from_recipe_name("rowwise")
model = convert_to_float8_training(nn.Sequential(Block(), Block()).bfloat16(), config=config)
x, g = torch.randn(2, 1, 32, 64, dtype=torch.bfloat16)
run = bind(checkpoint, model, use_reentrant=False, context_fn=bind(contexts, policy))
torch.compile(run)(x.requires_grad_(True)).backward(g)
same = [(a, b) for w, a in seen[1] for u, b in seen[0] if w.shape == u.shape and torch.equal(w, u)]
moved = [int((a != b).sum()) for a, b in same]
print(f"{len(same)} products computed again in backward; FP8 codes that moved: {moved}")
sys.exit(125 if not same else 1 if any(moved) else 0)
