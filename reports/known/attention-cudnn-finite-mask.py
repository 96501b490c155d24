"""cuDNN's attention looks at keys that a mask of bools hides, where their scores are beyond 65,504.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)
if not torch.cuda.is_available() or torch.empty(1, device="cuda").device.type != "cuda":
    print("cannot tell: the kernel is CUDA's, and there is no GPU")
    sys.exit(125)

bad = 0
for exponent in (15, 16, 17, 20):
    q, k = (torch.zeros(1, 1, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.ones(1, 1, 16, 64, device="cuda", dtype=torch.bfloat16)
    q[..., 0], k[0, 0, 15, 0], v[0, 0, 15] = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2), 1000.0
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda")
    mask[:, 15] = False  # no query sees the last key, whose value alone is not 1
    minus = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            by = [F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=1.0)[0, 0, 3, 0].item() for m in (mask, minus)]
        print(f"a hidden score of 2^{exponent}, {backend.name}: {by[0]} with a mask of bools, {by[1]} with one of -inf")
        bad += by != [1.0, 1.0]
sys.exit(bool(bad))
