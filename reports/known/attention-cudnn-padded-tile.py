"""The backward of cuDNN's attention makes NaN of a query's gradient, with a mask and 64 keys in the last tile of 128.
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
for tokens in (64, 96, 128, 192):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, tokens, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda")
    mask[7] = False  # a token of padding, which attends to nothing
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        leaves = [t.clone().requires_grad_(True) for t in (q, k, v)]
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(*leaves, attn_mask=mask).backward(grad)
        nan = [int(t.grad.isnan().sum()) for t in leaves]
        print(f"{tokens} tokens, {backend.name}: NaN in the gradients of query, key and value: {nan}")
        bad += backend is SDPBackend.CUDNN_ATTENTION and sum(nan) > 0
sys.exit(bool(bad))
