"""Attention: behind a large finite mask its gradients are too large by the number of keys.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
fused = {"cpu": SDPBackend.FLASH_ATTENTION}
if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda":
    fused["cuda"] = SDPBackend.EFFICIENT_ATTENTION
for device, fill in [(device, fill) for device in fused for fill in (-1e4, -1e9)]:
    q, k, v = (torch.randn(1, 1, 64, 32, device=device, requires_grad=True) for _ in range(3))
    mask = torch.zeros(64, 64, device=device)
    mask[7] = fill  # of one row every key is masked
    for backend in (fused[device], SDPBackend.MATH):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        (grad,) = torch.autograd.grad(out[0, 0, 7, 0], v)
        # the derivatives of a weighted mean, by what is weighted, are the weights: they add up to 1
        total = grad[0, 0, :, 0].double().sum().item()
        print(f"{device}, mask {fill:g}, {backend.name}: the gradients of that row's output add up to {total:.6g}")
        bad += backend is fused[device] and fill == -1e9 and abs(total - 1) > 0.5
sys.exit(bool(bad))
