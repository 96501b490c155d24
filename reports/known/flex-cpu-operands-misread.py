"""Compiled flex_attention on a CPU reads operands that the same graph sliced or computed from transposed
tensors as if they were contiguous.
"""
import logging, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch.nn.attention.flex_attention import flex_attention

torch.set_num_threads(1)
torch.manual_seed(0)
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
q, k, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16)
wide = torch.randn(2, 2, 16, 32)
cases = {
    "operands as they are": (lambda q, k, v: flex_attention(q, k, v), (q, k, v)),
    "k and v without their first rows": (lambda q, k, v: flex_attention(q, k[:, :, 8:], v[:, :, 8:]), (q, k, v)),
    "one of a batch": (lambda q, k, v: flex_attention(q, k[1:, :, :, :16], v[1:, :, :, 16:]), (q, wide, wide.clone())),
    "2 * q, of a transposed q": (lambda q, k, v: flex_attention(2 * q, k, v), (torch.randn(1, 2, 16, 8).mT, k, v)),
}
bad = 0
for name, (f, operands) in cases.items():
    with torch.no_grad():
        eager, compiled = f(*operands), torch.compile(f)(*operands)
    error = ((compiled - eager).norm() / eager.norm()).item()
    bad += error > 1e-3
    print(f"{name}: compiled differs from eager by {error:.1e} of its norm")
sys.exit(bool(bad))
