"""Attention on a CPU adds up its gradients over blocks of queries or keys in bf16 and fp16.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)


def gradient(dy, backend):
    """Of value, where 16 equal keys share every query alike."""
    q = torch.zeros(dy.shape, dtype=dy.dtype)
    k, v = (torch.zeros(1, 1, 16, dy.shape[-1], dtype=dy.dtype, requires_grad=True) for _ in range(2))
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v).backward(dy)
    return v.grad[0, 0, 0].double()


bad = 0
torch.manual_seed(0)
for dtype, small in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)):
    stalls = torch.full((1, 1, 16384, 64), small, dtype=dtype)
    stalls[:, :, :256] = 1
    for what, dy in (("1, then small", stalls), ("normally distributed", torch.randn(stalls.shape).to(dtype))):
        exact = dy.double().sum((0, 1, 2)) / 16
        off = {b.name: ((gradient(dy, b) - exact).norm() / exact.norm()).item()
               for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)}
        print(dtype, what, {name: f"{x:.2%}" for name, x in off.items()})
        bad += off["FLASH_ATTENTION"] > 2 * off["MATH"] and off["FLASH_ATTENTION"] > 1e-3
sys.exit(bool(bad))
