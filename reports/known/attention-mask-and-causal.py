"""torch.nn.functional.scaled_dot_product_attention takes attn_mask and is_causal=True together, which is documented to raise.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 6, 8) for _ in range(3))
mask = torch.rand(6, 6) < 0.7
mask.fill_diagonal_(True)
both = F.scaled_dot_product_attention(q, k, v, attn_mask=mask & torch.ones(6, 6, dtype=torch.bool).tril())
kernels = [("cpu", SDPBackend.FLASH_ATTENTION), ("cpu", SDPBackend.MATH)]
if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda":
    kernels += [("cuda", SDPBackend.EFFICIENT_ATTENTION), ("cuda", SDPBackend.MATH)]
bad, grown = 0, torch.zeros(6, 6, requires_grad=True)
for device, backend in kernels:
    try:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*(t.to(device) for t in (q, k, v)), attn_mask=mask.to(device), is_causal=True)
        print(f"{device} {backend.name} runs: as with both masks: {torch.allclose(out.cpu(), both, atol=1e-5)}")
        bad += 1
    except RuntimeError as error:
        print(f"{device} {backend.name} raises: {str(error)[:100]}")
for title, how in (("dropout", {"attn_mask": mask, "dropout_p": 0.1}), ("a mask that requires a gradient", {"attn_mask": grown})):
    try:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, **how)
        print(f"with {title} it runs")
    except RuntimeError as error:
        print(f"with {title} it raises: {str(error)[:100]}")
sys.exit(bool(bad))
