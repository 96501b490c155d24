"""Two selectively checkpointed forwards in one autocast region: the second one's recompute raises."""

import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
from functools import partial

import torch
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts as contexts)

torch.set_num_threads(1)


def recompute(ctx, operator, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def train(forwards, **how):
    """Gradients of so many forwards in one region, or what it raised."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(16, 16), torch.randn(16, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=how.pop("cache", True)):
        ys = [checkpoint(model, x, use_reentrant=False, **how) for _ in range(forwards)]
    try:
        for y in ys:
            y.sum().backward()
    except RuntimeError as error:
        return " ".join(str(error).split())[:75]
    return "runs"


selective = partial(contexts, recompute)
print("one forward:              ", train(1, context_fn=selective))
print("two, nothing selected:    ", train(2))
print("two, without autocast's cache:", train(2, context_fn=selective, cache=False))
shown = train(2, context_fn=selective)
print("two, selective:           ", shown)
sys.exit("not found in storage" in shown)
