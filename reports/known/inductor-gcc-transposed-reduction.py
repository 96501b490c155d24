"""x + linear(RMSNorm(x)) of a transposed x, compiled on a CPU by g++: garbage in x.grad."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import logging
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
logging.disable(logging.CRITICAL)
real = shutil.which(os.environ.get("CXX", "g++")) or ""
version = subprocess.run([real, "-dumpfullversion"], capture_output=True, text=True).stdout if real else ""
folder = tempfile.TemporaryDirectory()
tuned = Path(folder.name) / "g++"  # what a CPU that GCC does not know, or a masked one, gets from -march=native
tuned.write_text(f'#!/bin/sh\nexec "{real}" "$@" -mtune=generic\n')
tuned.chmod(0o755)
os.environ["CXX"] = str(tuned)
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
if not bad and not re.match("1[12][.]", version):
    print(f"cannot tell: g++ 11 and 12 do it, and this compiler is {real or 'none'} {version}")
    sys.exit(125)
cpu = Path("/proc/cpuinfo")
if not bad and not (cpu.is_file() and "GenuineIntel" in cpu.read_text()):
    print("cannot tell: it was seen on Intel's CPUs, for which GCC makes other code")
    sys.exit(125)
sys.exit(bool(bad))
