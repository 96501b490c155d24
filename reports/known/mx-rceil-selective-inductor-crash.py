"""MX RCEIL, compiled under selective checkpointing on CPU: the code generator has no type for E8M0."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import logging
logging.disable(logging.CRITICAL)
from functools import partial
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference


def contexts():
    seen = {False: 0, True: 0}

    def policy(ctx, func, *args, **kwargs):
        if func == torch.ops.aten.mm.default:
            seen[ctx.is_recompute] += 1
            if seen[ctx.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


torch.set_num_threads(1)
torch.manual_seed(0)
model = MXFP8Linear(32, 64, bias=False, dtype=torch.bfloat16,
                    scale_calculation_mode=ScaleCalculationMode.RCEIL,
                    kernel_preference=KernelPreference.EMULATED)
selective = partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
try:
    y = torch.compile(selective, backend="inductor")(torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True))
    y.sum().backward()
except Exception as e:
    print(type(e).__name__ + ":", " ".join(str(e).split())[:120])
    sys.exit(1)
print("compiles and runs")
