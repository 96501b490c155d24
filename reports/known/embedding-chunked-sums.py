"""The gradient of an embedding in bf16 or fp16 is summed in that dtype on a GPU, 32 ids at a time, up to 3072 ids.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
if not torch.cuda.is_available() or torch.empty(1, device="cuda").device.type != "cuda":
    print("cannot tell: the kernel is CUDA's, and there is no GPU")
    sys.exit(125)


def off(ids, rows, dtype):
    """How far the gradient of a table of 50 rows is from the exact sums, of their norm; and these
    sums rounded once."""
    table = torch.zeros(50, 16, dtype=dtype, device="cuda", requires_grad=True)
    F.embedding(ids.cuda(), table).backward(rows.to("cuda", dtype))
    exact = torch.zeros(50, 16, dtype=torch.float64).index_add_(0, ids, rows.to(dtype).double())
    both = (table.grad.cpu().double(), exact.to(dtype).double())
    return [((x - exact).norm() / exact.norm()).item() for x in both]


bad = 0
torch.manual_seed(0)
for count in (3072, 3073):
    ids, rows = torch.randint(50, (count,)), torch.randn(count, 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got, once = off(ids, rows, dtype)
        print(f"{count} ids, {dtype}: off by {got:.2%} of the norm, rounded once by {once:.2%}")
        bad += dtype != torch.float32 and got > 2 * once
sys.exit(bool(bad))
