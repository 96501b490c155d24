"""torch.compile drops the alpha of torch.add where a product, or attention's mask, is added.
"""
import logging, math, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
x, a, b = torch.randn(32, 16), torch.randn(32, 64), torch.randn(64, 16)
q, k, v, mask = *(torch.randn(2, 4, 16, 32) for _ in range(3)), torch.randn(2, 1, 16, 16)


def average(x, a, b):
    return x.clone().mul_(0.9).add_(a @ b, alpha=0.1)


def attention(q, k, v, mask):
    return torch.softmax(torch.add(q @ k.mT / math.sqrt(32), mask, alpha=3.0), -1) @ v


cases = {
    "torch.add(x, a @ b, alpha=0.1)": (lambda x, a, b: torch.add(x, a @ b, alpha=0.1), (x, a, b)),
    "torch.add(a @ b, x, alpha=3.0)": (lambda x, a, b: torch.add(a @ b, x, alpha=3.0), (x, a, b)),
    "a moving average of a product": (average, (x, a, b)),
    "attention whose mask is added with alpha=3.0": (attention, (q, k, v, mask)),
    "x + 0.1 * (a @ b)": (lambda x, a, b: x + 0.1 * (a @ b), (x, a, b)),
}
bad = 0
for name, (f, operands) in cases.items():
    eager, compiled = f(*operands), torch.compile(f)(*operands)
    error = ((compiled - eager).norm() / eager.norm()).item()
    bad += error > 1e-3
    print(f"{name}: compiled differs from eager by {error:.1e} of its norm")
sys.exit(bool(bad))
