"""torch.optim.SGD(fused=True) on a CPU leaves most of a bf16 or fp16 parameter as it is.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
bad = 0
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in (7, 64, 67):
        p = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        p.grad = torch.full((size,), 0.5, dtype=dtype)
        torch.optim.SGD([p], lr=0.25, fused=True).step()
        stayed = int((p == 1).sum())
        print(f"{dtype}, {size} elements: {stayed} stay at 1, where all should be 0.875")
        bad += stayed
sys.exit(bool(bad))
