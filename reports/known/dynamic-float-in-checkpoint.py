"""torch.compile(dynamic=True): a module's float used as an exponent inside of a checkpoint does not compile.
"""
import logging, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
torch.manual_seed(0)
logging.disable(logging.CRITICAL)


class Power(torch.nn.Module):
    exponent = 1.5

    def forward(self, x):
        return x**self.exponent


power, bad = Power(), 0
recomputed = lambda x: checkpoint(power, x, use_reentrant=False)
for name, f in (("plain", power), ("checkpointed", recomputed)):
    for dynamic in (False, True):
        torch._dynamo.reset()
        x = torch.rand(4, 3, requires_grad=True)
        try:
            torch.compile(f, dynamic=dynamic)(x).sum().backward()
            print(f"{name}, dynamic={dynamic}: compiles")
        except Exception as error:
            found = "KeyError: 'unbacked_bindings'" in str(error)
            print(f"{name}, dynamic={dynamic}: {type(error).__name__}; KeyError 'unbacked_bindings': {found}")
            bad += found
            if not found:
                raise
sys.exit(bool(bad))
