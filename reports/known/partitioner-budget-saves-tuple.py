"""activation_memory_budget below 1 and a kept multi-output operator: the partitioner saves a tuple."""

import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
import logging
from functools import partial

import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts as contexts)

logging.disable(logging.CRITICAL)
torch.set_num_threads(1)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MM = torch.ops.aten.mm.default


def attend(x, w):
    q = (x @ w).view(1, 2, 16, 8)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(16, 16).sin()


def keep(operators, ctx, operator, *args, **kwargs):
    kept = operator in operators
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


bad = 0
for operators in ((FLASH,), (MM,)):
    for budget in (1.0, 0.5, 0.0):
        for backend in ("aot_eager", "aot_eager_decomp_partition", "inductor"):
            torch._dynamo.reset()
            x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
            region = partial(checkpoint, attend, use_reentrant=False,
                             context_fn=partial(contexts, partial(keep, operators)))
            region(x, w).sum().backward()  # eager is fine
            try:
                with functorch.patch(activation_memory_budget=budget):
                    torch.compile(region, backend=backend)(x, w).sum().backward()
                shown = "runs"
            except Exception as error:
                shown = f"{type(error).__name__}: {' '.join(str(error).split())[:50]}"
                bad += "expected all tensors" in shown or "TensorBox" in shown
            print(f"keeps {operators[0]._schema.name[6:]} budget {budget} {backend}: {shown}")
sys.exit(bool(bad))
