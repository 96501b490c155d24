"""torch.index_add into one dimension, or by int32 ids, adds up in bf16 and fp16 on a CPU, one number at a time.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
bad = 0
torch.manual_seed(0)
groups, x = torch.randint(50, (4096,)), torch.randn(4096)
first = torch.zeros(4096, dtype=torch.long)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    zeros, ones = torch.zeros(50, dtype=dtype), torch.ones(4096, dtype=dtype)
    flat = zeros.index_add(0, first, ones)[0].item()
    rows, by_int32 = (
        torch.zeros(50, 2, dtype=dtype).index_add(0, ids, torch.ones(4096, 2, dtype=dtype))[0, 0].item()
        for ids in (first, first.int())
    )
    scattered = zeros.scatter_add(0, first, ones)[0].item()
    exact = torch.zeros(50, dtype=torch.float64).index_add(0, groups, x.to(dtype).double())
    off, least = (
        ((y.double() - exact).norm() / exact.norm()).item()
        for y in (zeros.index_add(0, groups, x.to(dtype)), exact.to(dtype))
    )
    print(f"{dtype}: 4096 ones give {flat}, as rows of two {rows}, by int32 ids {by_int32}, by scatter_add {scattered}; random numbers of 50 "
          f"groups: off by {off:.2%} of the norm, rounded once by {least:.2%}")
    bad += flat != 4096.0 or by_int32 != 4096.0
sys.exit(bool(bad))
