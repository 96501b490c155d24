"""Compiled bf16: the gradient of logsumexp(x * w) is wrong once scores reach tens; eager's is right.
"""
import logging, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
logging.disable(logging.CRITICAL)
loss = lambda x, w: torch.logsumexp(x * w, -1).pow(2).mean()


def gradient(f, x, w):
    x = x.detach().clone().requires_grad_()
    f(x, w).backward()
    return x.grad.double()


bad = 0
w = torch.randn(32).bfloat16()
for size in (1, 30, 100, 1000):
    x = (size * torch.randn(64, 32)).bfloat16()
    exact, eager = gradient(loss, x.double(), w.double()), gradient(loss, x, w)
    error = lambda g: ((g - exact).norm() / exact.norm()).item()
    compiled = {}
    for casts in (False, True):
        torch._dynamo.reset()
        with torch._inductor.config.patch(emulate_precision_casts=casts):
            compiled[casts] = error(gradient(torch.compile(loss), x, w))
    print(f"x of size {size}: error of the gradient of x: eager {error(eager):.4f}, compiled {compiled[False]:.4f}, "
          f"with emulate_precision_casts {compiled[True]:.4f}")
    bad += compiled[False] > 5 * error(eager)
sys.exit(bool(bad))
