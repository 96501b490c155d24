"""torch.sum of a bf16 or fp16 tensor on several threads rounds each thread's sum before it adds them up.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
import torch

x = torch.cat([torch.full((40000,), 2.0), torch.full((40000,), -2.0)])
bad = 0
for dtype in (torch.bfloat16, torch.float16):
    sums = {}
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        sums[threads] = x.to(dtype).sum().item()
    print(f"{dtype}: exact 0; " + ", ".join(f"{n} threads {s}" for n, s in sums.items()))
    bad += any(s != 0 for s in sums.values())
sys.exit(bool(bad))
