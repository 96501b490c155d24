"""Compiled for a CPU, index_add of fp16 and (on one thread) scatter_add of bf16 add up in 16 bits.
"""
import logging, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
rows = 5000
index = torch.zeros(rows, dtype=torch.long)


def index_add(x):
    return torch.zeros(1, 16, dtype=x.dtype).index_add(0, index, x)


def scatter_add(x):
    return torch.zeros(1, 16, dtype=x.dtype).scatter_add(0, index[:, None].expand_as(x), x)


bad = 0
for f in (index_add, scatter_add):
    for dtype in (torch.bfloat16, torch.float16):
        ones = torch.ones(rows, 16, dtype=dtype)
        eager, compiled = f(ones)[0, 0].item(), torch.compile(f)(ones)[0, 0].item()
        bad += compiled < 0.9 * rows <= eager
        print(f"{f.__name__} of {rows} ones in {dtype}: eager {eager:g}, compiled {compiled:g}")
sys.exit(bool(bad))
