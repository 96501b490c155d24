"""What weight[ids] gets as its gradient in bf16 or fp16 is summed in that dtype on a CPU, row by row.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)


def gradient(ids, rows, dtype):
    """Of a table with 50 rows."""
    table = torch.zeros(50, 16, dtype=dtype, requires_grad=True)
    table[ids].backward(rows.to(dtype))
    return table.grad


bad = 0
torch.manual_seed(0)
ids, rows = torch.randint(50, (4096,)), torch.randn(4096, 16)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    ones = gradient(torch.zeros(4096, dtype=torch.long), torch.ones(4096, 16), dtype)[0, 0].item()
    got = gradient(ids, rows, dtype).double()
    exact = torch.zeros(50, 16, dtype=torch.float64).index_add_(0, ids, rows.to(dtype).double())
    off, least = ((x - exact).norm() / exact.norm() for x in (got, exact.to(dtype).double()))
    print(f"{dtype}: 4096 ones give {ones}; random rows: off by {off:.2%} of the norm, rounded once by {least:.2%}")
    bad += ones != 4096.0
sys.exit(bool(bad))
