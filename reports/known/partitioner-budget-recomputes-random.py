"""activation_memory_budget below 1: backward recomputes dropout with other random numbers than forward drew."""

import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
import logging

import torch
import torch._functorch.config as functorch
import torch.nn.functional as F

logging.disable(logging.CRITICAL)
torch.set_num_threads(1)


def model(x, w, out):
    return F.dropout(F.gelu(x @ w), 0.25, True) @ out


bad = 0
for budget in (1.0, 0.5, 0.0):
    for backend, options in (("aot_eager", {}), ("aot_eager_decomp_partition", {}), ("inductor", {}),
                             ("inductor", {"fallback_random": True})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, out = torch.randn(32, 64), torch.eye(64)  # the identity: y shows what dropout left
        w = (torch.randn(64, 64) / 8).requires_grad_(True)
        out.requires_grad_(True)
        with functorch.patch(activation_memory_budget=budget):
            y = torch.compile(model, backend=backend, options=options or None)(x, w, out)
            y.backward(torch.ones_like(y))
        u = (x @ w).detach().requires_grad_(True)
        F.gelu(u).backward((y != 0).float() / 0.75)
        want = x.t() @ u.grad
        wrong = ((w.grad - want).norm() / want.norm()).item()
        print(f"budget {budget}, {backend} {options or ''}: the gradient is {wrong:.3g} of its norm away "
              "from that of the mask which the output shows")
        bad += wrong > 1e-3
sys.exit(1 if bad else 0)
