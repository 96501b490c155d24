"""Attention on a CPU: a query that is NaN gives 0 where there are fewer keys than a vector register holds.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import math
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)
bad = 0
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for keys in (1, 4, 64):
        q = torch.full((1, 1, 2, 8), math.nan, dtype=dtype)
        k = v = torch.ones(1, 1, keys, 8, dtype=dtype)
        got = {}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                got[backend.name] = F.scaled_dot_product_attention(q, k, v)[0, 0, 0, 0].item()
        print(dtype, f"{keys} keys:", got)
        bad += not math.isnan(got["FLASH_ATTENTION"])
sys.exit(bool(bad))
