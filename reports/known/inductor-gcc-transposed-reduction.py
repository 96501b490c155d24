"""x + linear(RMSNorm(x)) of a transposed x, compiled on a CPU by g++: garbage in x.grad."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import logging
import subprocess
logging.disable(logging.CRITICAL)
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
TOKENS, WIDTH = 192, 64
norm, linear = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH, bias=False)


def block(x):
    return x + linear(norm(x))


def grad_input(run, x):
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    y.backward(grad_output)
    return x.grad


channels_first, grad_output = torch.randn(WIDTH, TOKENS), torch.randn(TOKENS, WIDTH)
compiled, bad = torch.compile(block), 0
for name, x in (("contiguous", channels_first.t().contiguous()), ("transposed", channels_first.t())):
    expected, got = grad_input(block, x), grad_input(compiled, x)
    wrong = int((~((got - expected).abs() <= 0.01 * expected.abs().max())).sum())
    print(f"{name} x: largest gradient {got.abs().max():.3g}, eager {expected.abs().max():.3g}; {wrong} of {got.numel()} wrong")
    bad += wrong
asked = ("g++", "-march=native", "-Q", "--help=target")
tuned = subprocess.run(asked, capture_output=True, text=True).stdout
if not bad and not any(line.split() == ["-mtune=", "generic"] for line in tuned.splitlines()):
    print("cannot tell: g++ does not tune for generic here")
    sys.exit(125)
sys.exit(bool(bad))
